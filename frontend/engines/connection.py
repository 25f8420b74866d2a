"""The single stream to an engine's scheduler: requests up, tokens down.

The frontend keeps every open request's prompt and tokens. If the connection is lost, the requests
wait and are resubmitted on the next one with the tokens they have, to go on from there, or are
released to go on at another engine (`engines.pool`). A token is identified by (request, offset):
those already received are dropped, so none is repeated. What may have killed a scheduler is
submitted to the next one only when that says so (`suspects`).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import structlog
from grpc import aio

from frontend.engines.engine_calls import EngineCalls
from frontend.engines.messages import (
    abort_message,
    finish_of,
    is_orderly,
    logprob_rows,
    new_tokens,
    stands_for_itself,
    submit_message,
    suspects_message,
)
from frontend.engines.streams import Streams
from frontend.engines.suspects import Record, Suspects
from frontend.engines.token_stream import FinishReason, Start, TokenStream
from frontend.metrics import RequestMetrics
from frontend.request import Request
from nano_vllm_grpc.tls import FileError
from shared.backoff import Backoff
from shared.channels import PLAINTEXT, Dialer
from shared.errors import InternalError, QueueFullError, ServiceError, UnavailableError
from shared.pb import scheduler_pb2 as pb
from shared.pb.scheduler_pb2_grpc import SchedulerServiceStub

if TYPE_CHECKING:
    from shared.pb.scheduler_pb2_grpc import SchedulerServiceAsyncStub

log = structlog.get_logger(__name__)

Outgoing = asyncio.Queue[pb.FrontendMessage | None]  # None: nothing follows

_MIN_BACKOFF_S, _MAX_BACKOFF_S = 0.05, 1.0
_RETRY_AFTER_S = 0.5  # told to clients while there is no connection
# What one iteration of the event loop may do.
_LOGPROBS_AT_ONCE = 1 << 14
_SUBMISSIONS_AT_ONCE = 32
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
        streams: Streams | None = None,
        try_elsewhere: Callable[[TokenStream], bool] = lambda _: False,
        *,
        names_clients: bool = False,
    ) -> None:
        """Args:
        on_ready: is told whether the engine serves, at each change.
        resume_timeout_s: open requests outlive a lost connection by this.
        streams: all of this frontend's, if there are other engines.
        try_elsewhere: is given what the engine has no room for, and returns whether another has.
        names_clients: whether requests have a client with a name.
        """
        self._address = address
        self._on_ready = on_ready
        self._resume_timeout_s = resume_timeout_s
        self._dialer = dialer
        self.metrics = metrics or RequestMetrics()
        self.calls = EngineCalls()
        self._streams = streams or Streams()
        self._try_elsewhere = try_elsewhere
        self._names_clients = names_clients
        self._lost_at: float | None = None  # the connection, time.monotonic
        self._open: dict[int, TokenStream] = {}
        # What the connected scheduler does not have, and what it may have still; some ended.
        self._withheld: set[int] = set()
        self._withdrawn: set[int] = set()
        self._suspects = Suspects()
        self._serving = True  # as far as the scheduler says
        self.draining = False  # likewise
        self._holding = False  # nothing is submitted while the scheduler tries a suspect alone
        self._was_ready = False
        self._giving_up: asyncio.TimerHandle | None = None
        self.model_fingerprint = ""  # of the engine when it was last connected
        # Both None while there is no connection.
        self._info: pb.EngineInfo | None = None
        self._outgoing: Outgoing | None = None

    @property
    def connected(self) -> bool:
        return self._info is not None

    @property
    def serving(self) -> bool:
        """Whether a request that is submitted now would run."""
        return self.connected and self._serving and not self._holding and not self.draining

    @property
    def engine_info(self) -> pb.EngineInfo:
        """The limits of the connected engine.

        Raises:
            UnavailableError: there is no connection.
        """
        if self._info is None:
            raise no_engine()
        return self._info

    @property
    def num_open(self) -> int:
        return len(self._open)

    def open_streams(self) -> list[TokenStream]:
        """The completions that have not ended, in order of their numbers."""
        return [self._open[number] for number in sorted(self._open)]

    def has(self, stream: TokenStream) -> bool:
        return stream.number in self._open

    def is_suspect(self, stream: TokenStream) -> bool:
        """Whether schedulers died with a completion, so that it is only submitted on trial."""
        return stream.number in self._suspects

    def is_stranger(self, stream: TokenStream) -> bool:
        """Whether a completion was begun with another model than this engine's."""
        return self.model_of(stream) not in ("", self.model_fingerprint)

    def model_of(self, stream: TokenStream) -> str:
        """The fingerprint of the model that a completion here must go on with, the same as others
        of its request; empty: any."""
        known = (each.model_fingerprint for each in stream.group if each.model_fingerprint)
        begun = any(each.tokens for each in stream.group)
        return next(known, self.model_fingerprint if begun else "")

    def disconnect(self) -> None:
        """Has the scheduler end the connection, on which there is nothing left to do."""
        if self._outgoing is not None:
            self._outgoing.put_nowait(None)

    def submit(self, request: Request) -> list[TokenStream]:
        """Starts the completions of a request, each of which is open until it ends or is closed.

        Raises:
            UnavailableError: there is no connection.
        """
        if not self.connected:
            raise no_engine()
        streams = self._streams.open(request)
        self.begin(streams)
        return streams

    def begin(self, streams: Sequence[TokenStream], expected_cached: int = 0) -> None:
        """Submits the completions of a new request, of whose prompt the engine has
        `expected_cached` tokens. There is a connection."""
        assert self._outgoing is not None
        self._take_in(streams)
        if self._holding:
            self._withheld.update(stream.number for stream in streams)
        else:
            sampling = streams[0].request.sampling
            n = sampling.n if sampling.n > 1 else 0
            message = self._submission(streams[0], n=n, expected_cached=expected_cached)
            self._outgoing.put_nowait(message)

    def adopt(
        self,
        streams: Sequence[TokenStream],
        records: Sequence[Record | None],
        expected_cached: int = 0,
    ) -> None:
        """Goes on with completions that another engine had, which have new numbers, and with what
        is known of each as a suspect. The engine serves."""
        assert self._outgoing is not None
        self._take_in(streams)
        for stream, record in zip(streams, records, strict=True):
            if record and self._suspects.take_over(stream.number, record):
                losses = {stream.number: record.losses}
                self._withheld.add(stream.number)
                self._outgoing.put_nowait(suspects_message(losses))
            elif stands_for_itself(stream):
                self._outgoing.put_nowait(
                    self._submission(stream, resubmitted=True, expected_cached=expected_cached)
                )

    def release(self, streams: Sequence[TokenStream]) -> list[Record | None]:
        """Lets go of completions that go on elsewhere; returns what is known of each as a
        suspect."""
        records = [self._suspects.hand_over(stream.number) for stream in streams]
        for stream in streams:
            self._bind(stream)
            self.close(stream)
        return records

    def fail(self, streams: Sequence[TokenStream], error: ServiceError) -> None:
        """Ends completions with `error`."""
        for stream in streams:
            self.close(stream)
            stream.fail(error)

    def close(self, stream: TokenStream) -> None:
        """Has the scheduler drop a completion unless it has ended."""
        if self._drop(stream.number) is not None and self._outgoing is not None:
            self._outgoing.put_nowait(abort_message(stream))

    def _submission(self, stream: TokenStream, n: int = 0, **facts: Any) -> pb.FrontendMessage:
        return submit_message(stream, n, num_engines=self._streams.num_engines, **facts)

    def _take_in(self, streams: Sequence[TokenStream]) -> None:
        for stream in streams:
            self._open[stream.number] = stream
            stream.on_close = partial(self.close, stream)

    def _drop(self, number: int) -> TokenStream | None:
        stream = self._open.pop(number, None)
        if stream is not None:
            stream.settle()
        return stream

    def _bind(self, stream: TokenStream) -> None:
        """Notes the model that a completion's tokens are of, if that is not known."""
        stream.model_fingerprint = self.model_of(stream)

    async def run(self) -> None:
        """Connects, and reconnects whenever the connection is lost. Only cancellation ends it."""
        backoff = Backoff(_MIN_BACKOFF_S, _MAX_BACKOFF_S)
        while True:
            reason = await self._connect()
            log.warning("no connection to the scheduler", address=self._address, reason=reason)
            if self._info is not None:
                backoff.reset()
                await self._on_disconnected()
            await asyncio.sleep(backoff.next_s())

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
        if self._names_clients:
            outgoing.put_nowait(pb.FrontendMessage(names_clients=True))
        call = stub.Connect(_drain(outgoing))
        try:
            async for message in call:
                if message.HasField("engine_info"):
                    await self._on_connected(message.engine_info, outgoing)
                elif message.HasField("engine_state"):
                    self._serving = message.engine_state.serving
                    self.draining = message.engine_state.draining
                    await self._tell_ready()
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
        self.model_fingerprint = info.model_fingerprint
        self._serving, self._holding, self.draining = True, False, False
        losses = self._suspects.losses(self._open)
        losses = {n: count for n, count in losses.items() if not self.is_stranger(self._open[n])}
        if losses:
            log.warning("schedulers died with requests", suspects=len(losses))
            outgoing.put_nowait(suspects_message(losses))
        self._withheld, self._withdrawn = set(self._open), set()
        await self._submit_rest(outgoing)
        if self._lost_at is not None:
            self.metrics.recovery.observe(time.monotonic() - self._lost_at)
        await self._tell_ready()

    async def _submit_rest(self, outgoing: Outgoing) -> None:
        """Submits what was withheld, except suspects and what is of another model."""
        kept = {
            number
            for number in self._withheld
            if number in self._suspects
            or (number in self._open and self.is_stranger(self._open[number]))
        }
        rest, self._withheld = sorted(self._withheld - kept), kept
        for place, number in enumerate(rest, start=1):
            if place % _SUBMISSIONS_AT_ONCE == 0:
                await asyncio.sleep(0)
            stream = self._open.get(number)  # if it is not closed meanwhile
            if stream is not None and stands_for_itself(stream):
                outgoing.put_nowait(self._submission(stream, resubmitted=True))

    async def _tell_ready(self) -> None:
        if (ready := self.serving) != self._was_ready:
            self._was_ready = ready
            await self._on_ready(ready)

    async def _on_trial(self, trial: pb.Trial) -> None:
        outgoing, self._holding = self._outgoing, trial.withdraw or trial.alone
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
            outgoing.put_nowait(self._submission(stream, resubmitted=True))
        self._clear_suspects()
        if not self._holding:
            await self._submit_rest(outgoing)
        await self._tell_ready()

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
            self._drop(culprit.number)
            culprit.fail(InternalError("internal error"))

    async def _on_disconnected(self) -> None:
        self._info = self._outgoing = None
        self._lost_at = time.monotonic()
        self._suspects.end_trial()
        for stream in self._open.values():
            self._bind(stream)
        self._giving_up = asyncio.get_running_loop().call_later(
            self._resume_timeout_s, self._give_up
        )
        await self._tell_ready()

    def _give_up(self) -> None:
        reason = "the engine was lost and did not come back in time"
        self.fail(self.open_streams(), UnavailableError(reason, _RETRY_AFTER_S))

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
                stream.settle()
                self.metrics.queue_time.observe(started.queue_s)
        for finished in output.finished:
            stream = self._drop(finished.request)
            if stream is not None:
                end = finish_of(finished, stream.request.request_id)
                if isinstance(end, FinishReason):
                    stream.complete(end, finished.score)
                elif not (isinstance(end, QueueFullError) and self._try_elsewhere(stream)):
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
                self._streams.count_unread(len(rows.token_ids) // 4)

    def _fail_on_gap(self, stream: TokenStream, offset: int) -> None:
        log.error(
            "tokens are missing",
            request_id=stream.request.request_id,
            expected_offset=len(stream.tokens),
            offset=offset,
        )
        self.fail([stream], InternalError("internal error"))


def no_engine() -> UnavailableError:
    """The error of a request while there is no connection."""
    return UnavailableError("no engine is ready", _RETRY_AFTER_S)


async def _drain(outgoing: Outgoing) -> AsyncIterator[pb.FrontendMessage]:
    while (message := await outgoing.get()) is not None:
        yield message
