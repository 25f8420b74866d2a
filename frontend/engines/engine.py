"""An engine as this frontend sees it: its connection, its load and what its cache holds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import structlog

from frontend.engines.connection import SchedulerClient
from frontend.engines.placement import EngineLoad
from frontend.engines.prefix_index import Name, PrefixIndex
from frontend.engines.token_stream import TokenStream
from shared.errors import ServiceError
from shared.pb import scheduler_pb2 as pb

log = structlog.get_logger(__name__)

_WATCH_AGAIN_S = 0.5


@dataclass(frozen=True)
class Fit:
    """What a prompt would find at an engine: the tokens to compute, and those that are cached; of
    the blocks to compute, the names."""

    engine: Engine
    uncached_tokens: int
    cached_tokens: int = 0
    missing: Sequence[Name] = ()


class Engine:
    """One of several engines; no other of this frontend's has its number at the same time."""

    def __init__(self, number: int, connect: Callable[[Engine], SchedulerClient]) -> None:
        self.number = number
        self.listed = True  # else it gets nothing new, and loses what it has
        self.client = connect(self)
        self.load = EngineLoad()
        self.name = ""  # when it was last connected
        self.index: PrefixIndex | None = None  # that has its blocks, while it tells them
        self._lost_at: float | None = _now()  # since when it does not serve

    @property
    def serving(self) -> bool:
        """Whether requests may go to it now."""
        return self.listed and self.client.serving

    @property
    def is_drained(self) -> bool:
        """Whether it loses what it has because somebody wants it to."""
        return not self.listed or self.client.draining

    def note(self, ready: bool) -> None:
        """Takes note that its client is ready, or is not any more."""
        self._lost_at = None if ready else _now()
        if ready:
            self.name = self.client.engine_info.name

    def lost_for(self, seconds: float) -> bool:
        return self._lost_at is not None and _now() - self._lost_at >= seconds

    def may_return_with(self, model_fingerprint: str, within_s: float) -> bool:
        """Whether it may yet serve a model, any if empty, if it is back within `within_s` of its
        loss."""
        its = self.client.model_fingerprint
        possible = not its or model_fingerprint in ("", its)
        return possible and self._lost_at is not None and not self.lost_for(within_s)

    def is_gone_for(self, stream: TokenStream) -> bool:
        """Whether it will never go on with a completion that it has."""
        removed = not self.listed and not self.client.connected
        return removed or self.client.is_stranger(stream)

    def can_take(self, stream: TokenStream, model_fingerprint: str) -> bool:
        """Whether it has the model of a completion that was begun elsewhere, and enough room."""
        request = stream.request
        num_tokens = len(request.prompt_ids) + request.sampling.max_tokens
        fits = num_tokens <= self.client.engine_info.max_model_len
        return fits and model_fingerprint in ("", self.client.model_fingerprint)

    def fit(self, num_tokens: int, names: Sequence[Name], num_cached: int) -> Fit:
        """What a prompt of `num_tokens` tokens would find here, of whose blocks, called `names`,
        the first `num_cached` are in the cache."""
        cached = num_cached * self.client.engine_info.block_size
        return Fit(self, num_tokens - cached, cached, names[num_cached:])

    def submit(self, stream: TokenStream, fit: Fit, send: Callable[[int], None]) -> None:
        """Has `send` submit a request, whose first completion is `stream`; it is given the number
        of cached tokens."""
        load, index = self.load, self.index
        load.unstarted_tokens += fit.uncached_tokens
        if index:
            index.promise(self.number, fit.missing)

        def on_settled() -> None:
            load.unstarted_tokens -= fit.uncached_tokens
            if index:
                index.withdraw(self.number, fit.missing)

        stream.on_settled = on_settled
        send(fit.cached_tokens)

    def current_load(self) -> EngineLoad:
        self.load.num_open = self.client.num_open
        return self.load

    async def watch(self, index_of: Callable[[int], PrefixIndex]) -> None:
        """Keeps the load and the index, which `index_of` has for a block size, up to date; until
        cancelled."""
        reason = ""
        while True:
            try:
                index = index_of(self.client.engine_info.block_size)
                async with aclosing(self.client.calls.watch_blocks()) as messages:
                    async for message in messages:
                        await self._take(message, index)
            except ServiceError as error:  # not connected, fell behind, or one watcher too many
                if str(error) != reason:
                    reason = str(error)
                    log.info(
                        "an engine's cache cannot be watched; trying again",
                        engine=self.name,
                        reason=reason,
                    )
            except Exception:  # requests can be placed without the index
                log.exception("watching an engine's cache failed; starting anew", engine=self.name)
            self.stop_watching()
            await asyncio.sleep(_WATCH_AGAIN_S)

    def stop_watching(self) -> None:
        """Forgets what it holds."""
        if self.index is not None:
            self.index.forget(self.number)
            self.index = None

    async def _take(self, message: pb.BlockEvents, index: PrefixIndex) -> None:
        self.current_load().tell(message.load)
        await index.apply(self.number, message)
        self.index = index


def _now() -> float:
    return asyncio.get_running_loop().time()
