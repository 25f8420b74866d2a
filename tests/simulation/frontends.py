"""Frontends that trust nothing: every output must be the one that the oracle expects, both at the
scheduler's edge and when a frontend receives it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence as Seq
from random import Random

from scheduler_svc.core.sequence import FinishCause, Sequence, SequenceKey
from scheduler_svc.core.step import Output
from scheduler_svc.engine import Engine
from scheduler_svc.suspects import MIN_LOSSES, MIN_LOSSES_ALONE
from tests.simulation.attempts import Attempt, Client
from tests.simulation.checked_scheduler import CheckedScheduler
from tests.simulation.knobs import Knobs
from tests.simulation.workload import Request

_RETRY_S = 1.0
_TWINS_END = (FinishCause.INVALID, FinishCause.QUEUE_FULL)


class Connection:
    """A frontend's stream. Outputs arrive in order, some time after they were sent."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.alive = True
        self.last_at = 0.0


class Frontends:
    """All frontends, with their clients."""

    def __init__(
        self, knobs: Knobs, rng: Random, requests: Seq[Request], counts: Counter[str]
    ) -> None:
        self._knobs = knobs
        self._rng = rng
        self._counts = counts
        self._loop = asyncio.get_running_loop()
        self._clients = [Client(r, r.tokens[: r.resumed]) for r in requests]
        self._connections: list[Connection | None] = []
        self._num_connections = 0
        self._attempts: dict[int, Attempt] = {}  # by the sequence's id
        self._by_key: dict[SequenceKey, Attempt] = {}
        self.all_ended = self._loop.create_future()

    def serve(self, engine: Engine, scheduler: CheckedScheduler) -> None:
        """Plans everything that the frontends will do with this engine."""
        self._engine, self._scheduler = engine, scheduler
        for _ in range(self._knobs.frontends):
            self._connections.append(self._connect())
        for client in self._clients:
            if not client.request.siblings:
                self._loop.call_at(client.request.at, self._submit_group, client)
            if client.request.abort_at is not None:
                self._loop.call_at(client.request.abort_at, self._abort, client)
        end = self._clients[-1].request.at + self._knobs.longest_turn_s * 20
        for _ in range(self._knobs.disconnects):
            self._loop.call_at(self._rng.uniform(0, end), self._disconnect)

    def attempt_of(self, seq: Sequence) -> Attempt:
        return self._attempts[id(seq)]

    def attempt_at(self, key: SequenceKey) -> Attempt:
        return self._by_key[key]

    def emit(self, outputs: Seq[Output]) -> None:
        """Checks outputs and sends them off; the engine calls this."""
        delivered: dict[Connection, list[Output]] = {}
        for output in outputs:
            attempt = self.attempt_of(output.seq)
            if attempt.twin:
                assert output.end.cause in _TWINS_END, "two requests with one number"
                continue
            self._check(attempt, output)
            connection = self._connections[attempt.client.request.frontend]
            if connection is not None and connection.number == output.seq.key.connection:
                delivered.setdefault(connection, []).append(output)
        for connection, news in delivered.items():
            delay = self._rng.uniform(0, self._knobs.output_s)
            connection.last_at = max(connection.last_at, self._loop.time() + delay) + 1e-6
            self._loop.call_at(connection.last_at, self._deliver, connection, news)

    def _check(self, attempt: Attempt, output: Output) -> None:
        name, request = attempt.owner.name, attempt.client.request
        now = self._loop.time()
        late = now - max(request.deadline or now, attempt.seq.request.arrival)
        assert not attempt.ended, f"{name}: an output after its end: {output}"
        assert late <= self._knobs.longest_turn_s + 1e-3, f"{name}: {late} s after its deadline"
        if output.prompt_logprobs is not None:
            attempt.check_prompt_logprobs(output)
            self._counts["prompt logprobs"] += len(output.prompt_logprobs.ids)
        if output.token is not None:
            attempt.check_logprobs(output)
            self._counts["logprobs"] += output.logprobs is not None
            assert output.offset == attempt.num_tokens, f"{name}: offset {output.offset}"
            expected = attempt.owner.tokens[attempt.num_tokens : attempt.num_tokens + 1]
            assert [output.token] == expected, f"{name}: token {output.token}, not {expected}"
            attempt.num_tokens += 1
        attempt.ended = output.end is not None
        if output.end:
            self._check_end(attempt, output.end.cause)
        elif output.token is not None and attempt.cause:
            raise AssertionError(f"{name}: continues after its last token")

    def _check_end(self, attempt: Attempt, cause: FinishCause) -> None:
        request = attempt.client.request
        if cause is FinishCause.INTERNAL:
            # Or it was in flight at every loss, though the losses while alone had other reasons.
            by_chance = self._counts["losses"]
            losses = by_chance + self._counts["poisonings"]
            convicted = by_chance >= MIN_LOSSES_ALONE and losses >= MIN_LOSSES
            right = request.poison is not None or convicted
        elif cause is FinishCause.DEADLINE:
            right = request.deadline is not None and request.deadline <= self._loop.time()
        elif cause is FinishCause.QUEUE_FULL:
            client = request.client
            spent = client.input_tokens_per_minute or client.output_tokens_per_minute
            full = self._scheduler.num_waiting > 0
            right = (full or spent > 0) and not attempt.seq.request.resubmitted
        else:
            right = cause is attempt.cause
        self._counts[f"ended {cause.name}"] += 1
        assert right, f"{attempt.owner.name}: {cause.name} after {attempt.num_tokens} tokens"

    def _deliver(self, connection: Connection, outputs: list[Output]) -> None:
        """A frontend receives outputs, unless its connection was lost on the way."""
        if not connection.alive:
            return
        for output in outputs:
            client = self.attempt_of(output.seq).client
            if client.ended:  # aborted in the meantime
                continue
            if output.token is not None:
                assert output.offset == len(client.delivered), "tokens lost or repeated"
                client.delivered.append(output.token)
                if len(client.delivered) == client.request.abort_after and not output.end:
                    self._abort(client)
            if output.end and output.end.cause is FinishCause.QUEUE_FULL:
                self._loop.call_later(_RETRY_S, self._retry, client, client.current)
            elif output.end:
                self._end(client, output.end.cause.name)

    def _submit_group(self, client: Client) -> None:
        """Submits all completions of a prompt together, unless some have ended in the meantime."""
        n = client.request.n if client.request.tokens else 1  # otherwise it must be refused
        group = self._clients[client.request.number : client.request.number + n]
        if any(member.ended for member in group):
            for member in group:
                self._submit(member)
            return
        for member in group:
            member.submitted = True
        connection = self._connections[client.request.frontend]
        if connection is None or not self._submit(client, n):
            return
        for member in group[1:]:
            key = (connection.number, member.request.number)
            self._attempt(member, self._scheduler.sequence(key))
            self._counts["siblings"] += 1

    def _submit(self, client: Client, n: int = 1, *, resubmitted: bool = False) -> bool:
        """Submits a request. Returns whether it was accepted."""
        client.submitted = True
        connection = self._connections[client.request.frontend]
        if client.ended or connection is None:
            return False  # the next connection will submit it
        request, now = client.request, self._loop.time()
        key = (connection.number, request.number)
        seq = request.sequence(key, client.delivered, now, resubmitted=resubmitted)
        owner = self._attempt(client, seq).owner
        self._counts["submitted"] += 1
        self._counts["resumed"] += bool(client.delivered)
        self._engine.submit(seq, n if request.tokens else request.n)
        accepted = key in self._scheduler.open_sequences()
        if accepted and self._rng.random() < 0.05:
            twin = request.sequence(key, client.delivered, now)
            self._attempts[id(twin)] = Attempt(client, twin, owner, 0, twin=True)
            self._engine.submit(twin)
        return accepted

    def _attempt(self, client: Client, seq: Sequence) -> Attempt:
        number = len(self._attempts) + 1
        name = f"request {seq.key.number} of connection {seq.key.connection}"
        owner = client.request.owner(number, name, client.delivered)
        attempt = Attempt(client, seq, owner, len(client.delivered))
        client.attempts.append(attempt)
        self._attempts[id(seq)] = self._by_key[seq.key] = attempt
        return attempt

    def _retry(self, client: Client, refused: Attempt | None) -> None:
        if client.current is refused:
            self._submit_group(client)

    def _abort(self, client: Client) -> None:
        """Aborts: the client has gone, or has what it wants."""
        if client.ended:
            return
        if attempt := client.current:
            self._engine.abort(attempt.seq.key)
            attempt.ended = True
        self._end(client, "ABORTED")

    def _end(self, client: Client, how: str) -> None:
        assert not client.ended, f"request {client.request.number} ended twice"
        client.ended = how
        if all(client.ended for client in self._clients) and not self.all_ended.done():
            self.all_ended.set_result(None)

    def _connect(self) -> Connection:
        self._num_connections += 1
        return Connection(self._num_connections)

    def _disconnect(self) -> None:
        frontend = self._rng.randrange(self._knobs.frontends)
        connection = self._connections[frontend]
        if connection is None:
            return
        self._counts["disconnects"] += 1
        connection.alive = False
        self._connections[frontend] = None
        self._engine.abort_connection(connection.number)
        for attempt in self._attempts.values():
            if attempt.seq.key.connection == connection.number:
                attempt.ended = True
        self._loop.call_later(self._rng.uniform(0, 1), self._reconnect, frontend)

    def _reconnect(self, frontend: int) -> None:
        """Connects and resubmits prompts and delivered tokens."""
        self._connections[frontend] = self._connect()
        for client in self._clients:
            if client.request.frontend == frontend and client.submitted:
                self._submit(client, resubmitted=True)
