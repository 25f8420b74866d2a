"""The single stream to the scheduler: requests up, tokens down.

The frontend keeps every open request's prompt and tokens. If the connection is lost, the requests
wait and are resubmitted on the next one with the tokens they have, to go on from there. A token is
identified by (request, offset): those already received are dropped, so none is repeated. What may
have killed a scheduler is submitted to the next one only when that says so (`suspects`).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING
from weakref import WeakSet

import structlog
from grpc import aio

from frontend.call import CALL
from frontend.engine_calls import EngineCalls
from frontend.logprobs import PromptLogprobs
from frontend.metrics import RequestMetrics
from frontend.request import Request
from frontend.scheduler_messages import (
    abort_message,
    finish_of,
    is_orderly,
    logprob_rows,
    new_tokens,
    stands_for_itself,
    submit_message,
    suspects_message,
)
from frontend.suspects import Suspects
from frontend.token_stream import FinishReason, Start, TokenStream, Waiter
from shared.channels import PLAINTEXT, Dialer
from shared.errors import InternalError, QueueFullError, UnavailableError
from shared.pb import scheduler_pb2 as pb
from shared.pb.scheduler_pb2_grpc import SchedulerServiceStub
from shared.tls import FileError
from shared.turns import Turns

if TYPE_CHECKING:
    from shared.pb.scheduler_pb2_grpc import SchedulerServiceAsyncStub

log = structlog.get_logger(__name__)

Outgoing = asyncio.Queue[pb.FrontendMessage | None]  # None: nothing follows

# Log-probabilities of completions that clients have not read yet; some 70 bytes each.
MAX_UNREAD_LOGPROBS = 1 << 22
_MIN_BACKOFF_S, _MAX_BACKOFF_S = 0.05, 1.0
_RETRY_AFTER_S = 0.5  # told to clients while there is no connection
# What one iteration of the event loop may do.
_LOGPROBS_AT_ONCE = 1 << 14
_SUBMISSIONS_AT_ONCE = 32
# A step of the engine has a token for every open request. If all their chunks were written at once
# and the engine were faster than that, its steps would pile up unread and latency would grow
# without bound. With a few chunks at a time, of some tens of microseconds each, steps are read as
# they arrive, and a request that waits long for its turn gets the tokens of several in one chunk.
_WRITES_AT_ONCE = 8
_CONNECT_TIMEOUT_S = 10.0  # then comes a new channel, with the certificates of that time


class SchedulerClient:
    """Submits requests to the scheduler at `address`, over one connection at a time."""

    def __init__(
        self,
        address: str,
        on_ready: Callable[[bool], Awaitable[None]],
        resume_timeout_s: float = 300.0,  # a worker may have died as well, and has weights to load
        dialer: Dialer = PLAINTEXT,
        metrics: RequestMetrics | None = None,
    ) -> None:
        """`on_ready` is told whether the engine serves, at each change; open requests outlive a
        lost connection by `resume_timeout_s`."""
        self._address = address
        self._on_ready = on_ready
        self._resume_timeout_s = resume_timeout_s
        self._dialer = dialer
        self.metrics = metrics or RequestMetrics()
        self.calls = EngineCalls()
        self._lost_at: float | None = None  # the connection, time.monotonic
        self._next_number = 1
        self._open: dict[int, TokenStream] = {}
        # What the connected scheduler does not have, and what it may have still; some ended.
        self._withheld: set[int] = set()
        self._withdrawn: set[int] = set()
        self._suspects = Suspects()
        self._serving = True  # as far as the scheduler says
        self._holding = False  # nothing is submitted while the scheduler tries a suspect alone
        self._writes = Turns(_WRITES_AT_ONCE)
        self._scored: WeakSet[TokenStream] = WeakSet()  # until their calls end
        self._num_unread = 0  # log-probabilities that have come since they were last counted
        self._giving_up: asyncio.TimerHandle | None = None
        # Both None while there is no connection.
        self._info: pb.EngineInfo | None = None
        self._outgoing: Outgoing | None = None

    @property
    def serving(self) -> bool:
        """Whether a request that is submitted now would run."""
        return self._info is not None and self._serving and not self._holding

    @property
    def engine_info(self) -> pb.EngineInfo:
        """The limits of the connected engine.

        Raises:
            UnavailableError: there is no connection.
        """
        if self._info is None:
            raise UnavailableError("no engine is ready", _RETRY_AFTER_S)
        return self._info

    def submit(self, request: Request) -> list[TokenStream]:
        """Starts the completions of a request, each of which is open until it ends or is closed.

        Raises:
            UnavailableError: there is no connection.
        """
        if self._outgoing is None:
            raise UnavailableError("no engine is ready", _RETRY_AFTER_S)
        first, sampling = self._next_number, request.sampling
        self._next_number += sampling.num_completions
        call = CALL.get()
        waiter = Waiter(self._writes, call.caller if call else "")
        prompt = None
        if sampling.prompt_logprobs is not None:
            prompt = PromptLogprobs(len(request.prompt_ids))
        streams = [TokenStream(first, request, waiter, 0, prompt)]
        for index in range(1, sampling.num_completions):
            streams.append(TokenStream(first + index, request, waiter, index))
        if call and call.trace:
            traceparent = call.trace.begin_generation()
            for stream in streams:
                stream.traceparent = traceparent
        self._open.update((stream.number, stream) for stream in streams)
        if sampling.logprobs is not None:
            self._scored.update(streams)
        if self._holding:
            self._withheld.update(stream.number for stream in streams)
        else:
            n = sampling.n if sampling.n > 1 else 0
            self._outgoing.put_nowait(submit_message(streams[0], n=n))
        return streams

    def close(self, stream: TokenStream) -> None:
        """Has the scheduler drop a completion unless it has ended."""
        if self._open.pop(stream.number, None) is not None and self._outgoing is not None:
            self._outgoing.put_nowait(abort_message(stream))

    async def run(self) -> None:
        """Connects, and reconnects whenever the connection is lost. Only cancellation ends it."""
        backoff_s = _MIN_BACKOFF_S
        while True:
            reason = await self._connect()
            log.warning("no connection to the scheduler", address=self._address, reason=reason)
            if self._info is not None:
                backoff_s = _MIN_BACKOFF_S
                await self._on_disconnected()
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)

    async def _connect(self) -> str:
        """Runs one connection on a channel of its own; returns why it failed or ended."""
        try:
            async with self._dialer.open(self._address) as channel:
                with contextlib.suppress(TimeoutError):  # then the call says why
                    async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                        await channel.channel_ready()
                self.calls.stub = SchedulerServiceStub(channel)
                return await self._converse(self.calls.stub)
        except FileError as error:
            return str(error)
        finally:
            self.calls.stub = None

    async def _converse(self, stub: SchedulerServiceAsyncStub) -> str:
        """Runs one connection from start to end; returns why it ended."""
        outgoing: Outgoing = asyncio.Queue()
        call = stub.Connect(_drain(outgoing))
        try:
            async for message in call:
                if message.HasField("engine_info"):
                    await self._on_connected(message.engine_info, outgoing)
                elif message.HasField("engine_state"):
                    await self._on_serving(message.engine_state.serving, self._holding)
                elif message.HasField("trial"):
                    await self._on_trial(message.trial)
                else:
                    await self._take_all_logprobs(message.step_output)
                    self._on_step(message.step_output)
        except aio.AioRpcError as error:
            if self._outgoing is outgoing and not is_orderly(error):
                self._on_death()
            return f"{error.code().name}: {error.details()}"
        finally:
            call.cancel()
            outgoing.put_nowait(None)  # grpc.aio leaves an ended call's iterator waiting
        return "the scheduler ended the stream"

    async def _on_connected(self, info: pb.EngineInfo, outgoing: Outgoing) -> None:
        log.info("connected to the scheduler", address=self._address, resubmitted=len(self._open))
        if self._giving_up is not None:
            self._giving_up.cancel()
        self._info, self._outgoing = info, outgoing
        self._serving, self._holding = True, False
        if losses := self._suspects.losses(self._open):
            log.warning("schedulers died with requests", suspects=len(losses))
            outgoing.put_nowait(suspects_message(losses))
        self._withheld, self._withdrawn = set(self._open), set()
        await self._submit_rest(outgoing)
        if self._lost_at is not None:
            self.metrics.recovery.observe(time.monotonic() - self._lost_at)
        await self._on_ready(True)

    async def _submit_rest(self, outgoing: Outgoing) -> None:
        """Submits what was withheld, except suspects."""
        suspects = {number for number in self._withheld if number in self._suspects}
        rest, self._withheld = sorted(self._withheld - suspects), suspects
        for place, number in enumerate(rest, start=1):
            if place % _SUBMISSIONS_AT_ONCE == 0:
                await asyncio.sleep(0)
            stream = self._open.get(number)  # if it is not closed meanwhile
            if stream is not None and stands_for_itself(stream):
                outgoing.put_nowait(submit_message(stream, resubmitted=True))

    async def _on_serving(self, serving: bool, holding: bool) -> None:
        before = self._serving and not self._holding
        self._serving, self._holding = serving, holding
        if (ready := serving and not holding) != before:
            await self._on_ready(ready)

    async def _on_trial(self, trial: pb.Trial) -> None:
        outgoing, holds = self._outgoing, trial.withdraw or trial.alone
        assert outgoing is not None
        on_trial, cleared = self._suspects.begin_trial(trial.requests, alone=trial.alone)
        if trial.withdraw:
            self._withdrawn |= self._open.keys() - self._withheld
            self._withheld = set(self._open)
        else:
            self._withdrawn.clear()
        if trial.withdraw or cleared:
            outgoing.put_nowait(suspects_message(cleared=cleared, holding=trial.withdraw))
        for stream in filter(None, map(self._open.get, on_trial)):
            self._withheld.discard(stream.number)
            outgoing.put_nowait(submit_message(stream, resubmitted=True))
        self._clear_suspects()
        if not holds:
            await self._submit_rest(outgoing)
        await self._on_serving(self._serving, holds)

    def _clear_suspects(self) -> None:
        cleared = self._suspects.clear(self._open)
        if cleared and self._outgoing is not None:
            self._outgoing.put_nowait(suspects_message(cleared=cleared))

    def _on_death(self) -> None:
        """Counts the scheduler's death against the requests that it had."""
        without = self._withheld - self._withdrawn
        had = [s for n, s in self._open.items() if n not in without and stands_for_itself(s)]
        if culprit := self._suspects.lost(self._open, had):
            log.error(
                "a request kills the scheduler whenever it is submitted",
                request_id=culprit.request.request_id,
            )
            del self._open[culprit.number]
            culprit.fail(InternalError("internal error"))

    async def _on_disconnected(self) -> None:
        self._info = self._outgoing = None
        self._lost_at = time.monotonic()
        self._suspects.end_trial()
        self._giving_up = asyncio.get_running_loop().call_later(
            self._resume_timeout_s, self._give_up
        )
        await self._on_ready(False)

    def _give_up(self) -> None:
        for stream in self._open.values():
            stream.fail(
                UnavailableError(
                    "the engine was lost and did not come back in time", _RETRY_AFTER_S
                )
            )
        self._open.clear()

    def _on_step(self, output: pb.StepOutput) -> None:
        """Hands out the tokens of one engine step, then the ends that came with it.

        One pass over plain lists and one wake-up per request; no task and no await per token.
        """
        grown = set()
        now, observe = time.monotonic(), self.metrics.inter_token_latency.observe
        for number, offset, token_id in new_tokens(output):
            stream = self._open.get(number)
            if stream is None or offset < len(stream.tokens):
                continue  # closed in the meantime, or a token received before
            if offset > len(stream.tokens):
                self._fail_on_gap(stream, offset)
                continue
            if stream.last_token_at is not None:
                observe(now - stream.last_token_at)
            stream.append(token_id, now)
            grown.add(stream)
        for started in output.started:
            stream = self._open.get(started.request)
            if stream is not None and stream.start is None:
                stream.start = Start(started.cached_prompt_tokens, started.queue_s)
                self.metrics.queue_time.observe(started.queue_s)
        for finished in output.finished:
            stream = self._open.pop(finished.request, None)
            if stream is not None:
                end = finish_of(finished, stream.request.request_id)
                if isinstance(end, FinishReason):
                    stream.complete(end, finished.score)
                else:
                    stream.fail(end)
        for stream in grown:
            stream.waiter.wake()
        if self._suspects.on_trial:
            self._clear_suspects()

    async def _take_all_logprobs(self, output: pb.StepOutput) -> None:
        """Files a step's log-probabilities before its tokens, so that none is without, a few at a
        time: a step may score thousands of a prompt's tokens."""
        num_entries = 0
        for rows in output.logprobs:
            self._take_logprobs(rows)
            num_entries += len(rows.token_ids) // 4
            if num_entries > _LOGPROBS_AT_ONCE:
                await asyncio.sleep(0)
                num_entries = 0

    def _take_logprobs(self, rows: pb.LogprobRows) -> None:
        stream = self._open.get(rows.request)
        if stream is None:
            return
        logprobs = stream.prompt_logprobs if rows.prompt else stream.logprobs
        if logprobs is not None:
            logprobs.add(rows.first, logprob_rows(rows))
            if rows.prompt:
                stream.waiter.wake()  # tokens of other completions may be waiting for them
            else:
                self._num_unread += len(rows.token_ids) // 4
                if self._num_unread > MAX_UNREAD_LOGPROBS:
                    self._drop_unread()

    def _drop_unread(self) -> None:
        """Counts what clients have not read, and if it is too much, ends the completions that have
        most of it."""
        unread = [
            (stream.logprobs.num_entries, stream)
            for stream in self._scored
            if stream.logprobs is not None
        ]
        unread.sort(key=lambda each: each[0])
        self._num_unread = sum(count for count, _ in unread)
        if self._num_unread > MAX_UNREAD_LOGPROBS:
            while self._num_unread > MAX_UNREAD_LOGPROBS // 2:
                count, stream = unread.pop()
                self._num_unread -= count
                self.close(stream)
                stream.logprobs = None
                stream.fail(
                    QueueFullError(
                        f"sampling.logprobs: {count} have not been read, more than of any other "
                        f"request; the limit is {MAX_UNREAD_LOGPROBS} of all",
                        _RETRY_AFTER_S,
                    )
                )

    def _fail_on_gap(self, stream: TokenStream, offset: int) -> None:
        log.error(
            "tokens are missing",
            request_id=stream.request.request_id,
            expected_offset=len(stream.tokens),
            offset=offset,
        )
        self.close(stream)
        stream.fail(InternalError("internal error"))


async def _drain(outgoing: Outgoing) -> AsyncIterator[pb.FrontendMessage]:
    while (message := await outgoing.get()) is not None:
        yield message
