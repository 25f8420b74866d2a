"""An engine, which is a scheduler and its ranks, as this frontend sees it.

The frontend keeps every open request's prompt and tokens. If the connection is lost, the requests
wait for the next connection and are resubmitted there with the tokens that they have. Or they are
released to continue on another engine (`engines.pool`). A token is identified by (request, offset).
A token that was received before is dropped, so that none is repeated. Requests that may have killed
schedulers are submitted one at a time (`engines.deaths`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from math import inf
from typing import Any

import structlog

from frontend.engines.connection import RETRY_AFTER_S, SchedulerConnection, no_engine
from frontend.engines.ledger import Entry, Ledger
from frontend.engines.messages import abort_message, submit_message
from frontend.engines.outputs import Outputs
from frontend.engines.placement import EngineLoad, Fit
from frontend.engines.prefix_index import Name, PrefixIndex
from frontend.engines.streams import Streams
from frontend.engines.token_stream import TokenStream
from frontend.engines.trials import Trials
from frontend.metrics import RequestMetrics
from shared.channels import Dialer
from shared.errors import InternalError, ServiceError, UnavailableError
from shared.pb import scheduler_pb2 as pb

log = structlog.get_logger(__name__)

# How long new requests wait for a lost engine: a new process loads a few gigabytes in this time.
_RECOVERY_S = 30.0
_RESUME_S = 300.0  # open requests wait so long: a worker may have died, too, and load weights
_SUBMISSIONS_AT_ONCE = 32  # in one iteration of the event loop
_WATCH_AGAIN_S = 0.5


class EngineClient:
    """The engine whose scheduler is at `address`."""

    def __init__(
        self,
        address: str,
        on_ready: Callable[[EngineClient, bool], Awaitable[None]],
        dialer: Dialer,
        metrics: RequestMetrics,
        streams: Streams,
        try_elsewhere: Callable[[EngineClient, TokenStream], bool],
        *,
        number: int,
    ) -> None:
        """Args:
        on_ready: is called at each change, with the engine and whether it is ready.
        streams: those of the whole frontend.
        try_elsewhere: is called with the engine and a completion for which it has no room. Returns
            whether another engine takes the completion.
        number: unique among the current engines of this frontend.
        """
        self.number = number
        self.listed = True  # if not, it gets no new requests and its completions move
        self.load = EngineLoad()
        self.index: PrefixIndex | None = None  # has its blocks while they are watched
        self.metrics = metrics
        self.streams = streams
        self.ledger = Ledger(number, self.load)
        self._outputs = Outputs(self.ledger, self.metrics)
        self.connection = SchedulerConnection(
            address,
            dialer,
            self._on_message,
            self._on_lost,
            lambda: self._trials.need_to_be_alone(),
        )
        self._trials = Trials(
            self.ledger,
            lambda stream: self._submit(stream, resubmitted=True),
            self.connection.close,
            self.has_other_model,
        )
        self._on_ready = on_ready
        self._try_elsewhere = try_elsewhere
        # From the last connection.
        self.name = ""
        self.model_fingerprint = ""
        self.info = pb.EngineInfo()
        # As its scheduler last reported.
        self.draining = False
        self._serving = True
        self._may_be_lost_again = True  # not by a scheduler's first state after a loss
        self._was_ready = False
        self._not_ready_since = time.monotonic()
        self._lost_at = -inf  # when it last lost its connection or its workers
        self._giving_up: asyncio.TimerHandle | None = None

    # The engine's state.

    @property
    def connected(self) -> bool:
        return self.connection.info is not None

    @property
    def ready(self) -> bool:
        """Whether a request that is submitted now would run."""
        return not (self.is_lost or self.connection.is_alone or self.draining)

    @property
    def serving(self) -> bool:
        """Whether new requests may be sent to it now."""
        return self.listed and self.ready

    @property
    def is_drained(self) -> bool:
        """Whether its completions move because it is to stop: it is not listed, or it drains."""
        return not self.listed or self.draining

    @property
    def is_lost(self) -> bool:
        """Whether it has no connection or no workers."""
        return not (self.connected and self._serving)

    @property
    def recovers(self) -> bool:
        """Whether new requests wait for it, because it was lost less than `_RECOVERY_S` ago."""
        return self.listed and self.is_lost and time.monotonic() - self._lost_at < _RECOVERY_S

    def lost_for(self, seconds: float) -> bool:
        """Whether it has not been ready for at least `seconds`."""
        return not self._was_ready and time.monotonic() - self._not_ready_since >= seconds

    def may_return_with(self, model_fingerprint: str, within_s: float) -> bool:
        """Whether it may return with a model, any if empty, within `within_s` seconds of its
        loss."""
        possible = not self.model_fingerprint or model_fingerprint in ("", self.model_fingerprint)
        return possible and not self._was_ready and not self.lost_for(within_s)

    # The completions that it has or can take.

    @property
    def num_open(self) -> int:
        return len(self.ledger.entries)

    def open_streams(self) -> list[TokenStream]:
        """The completions that have not ended, in the order in which they arrived."""
        return [entry.stream for entry in self.ledger.entries.values()]

    def has(self, stream: TokenStream) -> bool:
        return stream.number in self.ledger.entries

    def model_of(self, stream: TokenStream) -> str:
        """The fingerprint of the model with which a completion and the others of its request must
        continue. Empty if any model will do."""
        begun = any(each.tokens for each in stream.group)
        return stream.model_fingerprint or (self.model_fingerprint if begun else "")

    def has_other_model(self, stream: TokenStream) -> bool:
        """Whether a completion was begun with another model than this engine's."""
        return self.model_of(stream) not in ("", self.model_fingerprint)

    def is_gone_for(self, stream: TokenStream) -> bool:
        """Whether it will never continue a completion that it has."""
        removed = not self.listed and not self.connected
        return removed or self.has_other_model(stream)

    def can_take(self, stream: TokenStream, model_fingerprint: str) -> bool:
        """Whether it has the model and the room for a completion that was begun elsewhere."""
        request = stream.request
        num_tokens = len(request.prompt_ids) + request.sampling.max_tokens
        fits = num_tokens <= self.info.max_model_len
        return fits and model_fingerprint in ("", self.model_fingerprint)

    def fit(self, num_tokens: int, names: Sequence[Name], num_cached: int) -> Fit:
        """The fit of a prompt of `num_tokens` tokens at this engine. `names`: of the prompt's
        blocks, of which the first `num_cached` are in the cache."""
        cached = num_cached * self.info.block_size
        return Fit(num_tokens - cached, cached, names[num_cached:], self.index)

    # Submitting and dropping completions.

    def submit(self, streams: Sequence[TokenStream], fit: Fit | None = None) -> None:
        """Has the engine compute the completions of a request, at once or when it has recovered.

        Raises:
            QueueFullError: too many requests wait for the engine.
            UnavailableError: there is no connection, and the engine does not recover.
        """
        if not (self.connected or self.recovers):
            raise no_engine()
        withheld = not self.connected or self.connection.is_alone
        if withheld:
            self.ledger.check_room(self.info.max_waiting)
        fit, now = fit or Fit(), time.monotonic()
        entries = self.ledger.add(streams, fit)
        for stream in streams:
            stream.holder = self
            stream.arrived_at = stream.arrived_at or now
        if not withheld:
            self._submit_withheld(entries, now, fit.cached_tokens)
            if any(stream.record.is_suspect for stream in streams):
                self._trials.begin()

    def release(self, streams: Sequence[TokenStream]) -> None:
        """Drops completions of a request, which continue on another engine with new numbers."""
        for stream in streams:
            self._note_model(stream)
            self.close(stream)
        self.streams.number(streams)

    def fail(self, streams: Sequence[TokenStream], error: ServiceError) -> None:
        """Ends completions with `error`."""
        for stream in streams:
            self.close(stream)
            stream.fail(error)

    def close(self, stream: TokenStream) -> None:
        """Has the scheduler drop a completion, unless the completion has ended."""
        if self.ledger.remove(stream.number):
            self.connection.send(abort_message(stream))
            self._trials.check()

    def _note_model(self, stream: TokenStream) -> None:
        """Notes the model that computed a completion's tokens, unless it is already known."""
        stream.model_fingerprint = self.model_of(stream)

    def _submit(self, stream: TokenStream, **facts: Any) -> None:
        message = submit_message(stream, num_engines=self.streams.num_engines, **facts)
        self.connection.send(message)

    def _submit_withheld(self, entries: Iterable[Entry], now: float, cached: int = 0) -> None:
        """Submits completions, each with the tokens that it has, except suspects and those that are
        submitted already. The completions of a new request are submitted together."""
        for entry in entries:
            stream, n = entry.stream, entry.stream.request.sampling.n
            if entry.submitted or stream.record.is_suspect:
                continue
            if not stream.sent:
                for each in stream.group:
                    self.ledger.entries[each.number].submitted = True
                    each.sent, each.withheld_s = True, now - each.arrived_at
                self._submit(stream, n=n if n > 1 else 0, expected_cached=cached)
                continue
            entry.submitted = True
            if stream.stands_for_itself:
                self._submit(stream, resubmitted=True, expected_cached=cached)

    # Messages from the scheduler, and the loss of the connection.

    async def _on_message(self, message: pb.SchedulerMessage) -> None:
        if message.HasField("step_output"):
            await self._on_step(message.step_output)
        elif message.HasField("engine_state"):
            was_serving, self._serving = self._serving, message.engine_state.serving
            self.draining = message.engine_state.draining
            if was_serving and not self._serving and self._may_be_lost_again:
                self._note_loss()
            self._may_be_lost_again = True
            await self._report_ready()
        elif message.HasField("engine_info"):
            await self._on_connected(message.engine_info)

    async def _on_connected(self, info: pb.EngineInfo) -> None:
        address = self.connection.address
        log.info("connected to the scheduler", address=address, resubmitted=self.num_open)
        if self._giving_up is not None:
            self._giving_up.cancel()
        self.info, self.name, self.model_fingerprint = info, info.name, info.model_fingerprint
        self._serving, self.draining, self._may_be_lost_again = True, False, self._lost_at == -inf
        self._trials.connected(alone=self.connection.is_alone)
        if not self.connection.is_alone:
            await self._submit_rest()
        if self._lost_at > -inf:
            self.metrics.recovery.observe(time.monotonic() - self._lost_at)
        await self._report_ready()

    async def _on_lost(self, died: bool) -> None:
        self._note_loss()
        died &= not self.draining  # a slow stop is killed
        culprit = self.ledger.disconnect(died=died, alone=self.connection.is_alone)
        self._trials.disconnected()
        if culprit:
            log.error(
                "request kills every scheduler that runs it; failing the request",
                request_id=culprit.request.request_id,
            )
            self.fail([culprit], InternalError("internal error"))
        for stream in self.open_streams():
            self._note_model(stream)
        self._giving_up = asyncio.get_running_loop().call_later(_RESUME_S, self._give_up)
        await self._report_ready()

    async def _report_ready(self) -> None:
        if (ready := self.ready) != self._was_ready:
            self._was_ready = ready
            self._not_ready_since = time.monotonic()
            await self._on_ready(self, ready)

    def _note_loss(self) -> None:
        self._lost_at = time.monotonic()
        asyncio.get_running_loop().call_later(_RECOVERY_S, self._refuse_new, self._lost_at)

    def _refuse_new(self, lost_at: float) -> None:
        """Fails the requests that arrived after the engine was lost, unless it has returned."""
        if self._lost_at == lost_at and self.is_lost:
            streams = [each for each in self.open_streams() if each.arrived_at > lost_at]
            self.fail(streams, no_engine())

    def _give_up(self) -> None:
        error = UnavailableError("the engine was lost and did not return in time", RETRY_AFTER_S)
        self.fail(self.open_streams(), error)

    async def _submit_rest(self) -> None:
        """Submits the withheld completions, except those of another model."""
        numbers = [*self.ledger.entries]
        for start in range(0, len(numbers), _SUBMISSIONS_AT_ONCE):
            part = map(self.ledger.entries.get, numbers[start : start + _SUBMISSIONS_AT_ONCE])
            rest = (e for e in part if e and not self.has_other_model(e.stream))
            self._submit_withheld(rest, time.monotonic())
            await asyncio.sleep(0)

    async def _on_step(self, output: pb.StepOutput) -> None:
        await self._outputs.take_logprobs(output)
        self._outputs.take_embeddings(output)
        self.fail(self._outputs.take_tokens(output), InternalError("internal error"))
        for stream, error in self._outputs.take_ends(output):
            if not self._try_elsewhere(self, stream):
                stream.fail(error)
        self._trials.check()

    # Watching the engine's cache.

    async def watch(self, index_of: Callable[[int], PrefixIndex]) -> None:
        """Keeps the load and the index up to date until cancelled. `index_of`: returns the index
        for a block size."""
        reason = ""
        while True:
            try:
                with self.connection.stub() as stub:
                    index = index_of(self.info.block_size)
                    call = stub.WatchBlocks(pb.WatchBlocksRequest())
                    try:
                        async for message in call:
                            await self._take(message, index)
                    finally:
                        call.cancel()
            except ServiceError as error:  # not connected, fell behind, or too many watchers
                if str(error) != reason:
                    reason = str(error)
                    log.info(
                        "cannot watch an engine's cache; retrying",
                        engine=self.name,
                        reason=reason,
                    )
            except Exception:  # requests can be placed without the index
                log.exception("watching an engine's cache failed; retrying", engine=self.name)
            self.stop_watching()
            await asyncio.sleep(_WATCH_AGAIN_S)

    def stop_watching(self) -> None:
        """Removes the engine's blocks from the index."""
        if self.index is not None:
            self.index.forget(self.number)
            self.index = None

    async def _take(self, message: pb.BlockEvents, index: PrefixIndex) -> None:
        self.load.update(message.load)
        await index.apply(self.number, message)
        self.index = index
