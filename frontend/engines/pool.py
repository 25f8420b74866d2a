"""All engines that a frontend knows: sends each request where it has its first token soonest, and
moves what an engine cannot go on with to another.

Completions move when their engine is lost, has lost its workers, is drained or is not listed any
more, to one with the same model, which computes their tokens again and goes on after them: in
float32 with the same tokens. What was there at two losses in a row without getting any further may
be why: it stays for a while, so that it takes no third engine along.
"""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from weakref import WeakKeyDictionary

import structlog

from frontend.engines.connection import SchedulerClient, no_engine
from frontend.engines.engine import Engine, Fit
from frontend.engines.engine_calls import EngineCalls
from frontend.engines.placement import choose
from frontend.engines.prefix_index import PrefixIndex
from frontend.engines.sources import Place, watch_places
from frontend.engines.streams import Streams
from frontend.engines.token_stream import TokenStream
from frontend.metrics import RequestMetrics
from frontend.request import Request
from shared.channels import PLAINTEXT, Dialer
from shared.errors import FailedPreconditionError, InvalidArgumentError
from shared.pb import scheduler_pb2 as pb

log = structlog.get_logger(__name__)

# What was lost twice in a row waits for so long for its scheduler, before it goes to another.
_PATIENCE_S = 10.0
# So long it waits for its workers, which have weights to load: with them the scheduler finds out
# whether it is to blame. What no engine has the model for waits as long for one that had it.
_RETURN_S = 300.0
# What gets that many tokens from one engine is not why the one before was lost.
_MIN_PROGRESS = 4
_DRAIN_LOOK_S = 0.1  # between looks at what a drained engine has left
_MOVES_AT_ONCE = 32  # requests, in one iteration of the event loop


class Engines:
    """The engines whose schedulers are at `sources` (`sources.watch_places`)."""

    def __init__(
        self,
        sources: Sequence[str],
        on_ready: Callable[[bool], Awaitable[None]],
        dialer: Dialer = PLAINTEXT,
        metrics: RequestMetrics | None = None,
        refuse: Callable[[str], object] = lambda _: None,
        *,
        names_clients: bool = False,
    ) -> None:
        """Args:
        on_ready: is told whether any engine serves, at each change.
        refuse: raises ValueError for an address that must not be called.
        names_clients: whether requests have a client with a name.
        """
        self._sources = sources
        self._on_ready = on_ready
        self._dialer = dialer
        self.metrics = metrics or RequestMetrics()
        self._refuse = refuse
        self._names_clients = names_clients
        self._streams = Streams()
        self._engines: dict[Place, Engine] = {}
        self._tasks: dict[Engine, list[asyncio.Task[None]]] = {}
        self._indexes: dict[int, PrefixIndex] = {}  # by block size
        self._was_serving = False
        self._changed = asyncio.Event()  # streams may have to move, or may be able to
        # Tokens that a completion had when it last moved from a lost engine.
        self._moved_at: WeakKeyDictionary[TokenStream, int] = WeakKeyDictionary()
        # Engines without room for a request, by its first completion.
        self._refused: WeakKeyDictionary[TokenStream, set[Engine]] = WeakKeyDictionary()

    @property
    def serving(self) -> bool:
        """Whether a request that is submitted now would run."""
        return any(engine.serving for engine in self._engines.values())

    @property
    def engine_info(self) -> pb.EngineInfo:
        """The limits within which every connected engine can take a request, and the capacity of
        all of them.

        Raises:
            UnavailableError: there is no connection.
        """
        infos = [engine.client.engine_info for engine in self._connected()]
        if not infos:
            raise no_engine()
        if len(infos) == 1:
            return infos[0]
        merged = pb.EngineInfo()
        merged.CopyFrom(infos[0])
        merged.max_model_len = min(info.max_model_len for info in infos)
        merged.vocab_size = min(info.vocab_size for info in infos)
        for name in ("num_blocks", "max_num_seqs", "max_waiting"):
            setattr(merged, name, sum(getattr(info, name) for info in infos))
        return merged

    def connected(self) -> list[tuple[pb.EngineInfo, EngineCalls]]:
        """The connected engines' limits, and calls to each.

        Raises:
            UnavailableError: there are none.
        """
        found = [(each.client.engine_info, each.client.calls) for each in self._connected()]
        if not found:
            raise no_engine()
        return found

    def submit(self, request: Request) -> list[TokenStream]:
        """Starts the completions of a request, each of which is open until it ends or is closed.

        Raises:
            InvalidArgumentError: no engine has the name that it gives.
            UnavailableError: there is no connection.
        """
        engines = self._candidates(request)
        streams = self._streams.open(request)
        self._begin(streams, engines)
        return streams

    async def run(self) -> None:
        """Finds engines and connects to them. Only cancellation ends it."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._move_streams())
            async for places in watch_places(self._sources, self._refuse):
                self._list(places, tasks)

    # Which engines there are.

    def _list(self, places: Sequence[Place], tasks: asyncio.TaskGroup) -> None:
        for place, engine in self._engines.items():
            engine.listed = place in places
        for place in places:
            if place not in self._engines:
                used = {engine.number for engine in self._engines.values()}
                number = min(set(range(len(used) + 1)) - used)
                engine = self._engines[place] = Engine(number, partial(self._connect, place))
                self._tasks[engine] = [tasks.create_task(engine.client.run())]
        if len(self._engines) > 1:
            log.info("engines", addresses=[place.address for place in places])
            for engine, its_tasks in self._tasks.items():
                if len(its_tasks) == 1:
                    its_tasks.append(tasks.create_task(engine.watch(self._index_of)))
        self._streams.num_engines = max(len(places), 1)
        self._changed.set()

    def _connect(self, place: Place, engine: Engine) -> SchedulerClient:
        dialer = self._dialer
        if place.name and dialer.tls and not dialer.tls.server_name:
            dialer = replace(dialer, tls=replace(dialer.tls, server_name=place.name))
        return SchedulerClient(
            place.address,
            partial(self._on_engine_ready, engine),
            dialer=dialer,
            metrics=self.metrics,
            streams=self._streams,
            try_elsewhere=partial(self._try_elsewhere, engine),
            names_clients=self._names_clients,
        )

    def _index_of(self, block_size: int) -> PrefixIndex:
        return self._indexes.setdefault(block_size, PrefixIndex(block_size))

    async def _on_engine_ready(self, engine: Engine, ready: bool) -> None:
        engine.note(ready)
        if not ready:
            for wait_s in (_PATIENCE_S, _RETURN_S):
                asyncio.get_running_loop().call_later(wait_s, self._changed.set)
        self._changed.set()
        await self._tell_ready()

    async def _tell_ready(self) -> None:
        self.metrics.num_engines_serving = len(self._serving())
        if self.serving != self._was_serving:
            self._was_serving = self.serving
            await self._on_ready(self.serving)

    def _connected(self) -> list[Engine]:
        return [engine for engine in self._engines.values() if engine.client.connected]

    def _serving(self) -> list[Engine]:
        return [engine for engine in self._engines.values() if engine.serving]

    # Where new requests go.

    def _candidates(self, request: Request) -> list[Engine]:
        """The engines that may have a new request: those that serve, else those where it would
        wait."""
        engines = self._connected()
        if request.engine:
            named = [each for each in self._engines.values() if each.name == request.engine]
            if not named and engines:
                names = ", ".join(sorted({engine.name for engine in engines}))
                raise InvalidArgumentError(
                    "engine", f"there is none of this name; there are: {names}"
                )
            engines = [engine for engine in named if engine.client.connected]
        if not engines:
            raise no_engine()
        return [engine for engine in engines if engine.serving] or engines

    def _begin(self, streams: Sequence[TokenStream], engines: Sequence[Engine]) -> None:
        fit = self._choose(streams[0], engines)
        fit.engine.submit(streams[0], fit, partial(fit.engine.client.begin, streams))

    def _choose(self, stream: TokenStream, engines: Sequence[Engine]) -> Fit:
        """The best of `engines` for a completion."""
        request = stream.request
        ids = array("I", request.prompt_ids)
        ids.extend(stream.tokens)
        if len(self._engines) == 1:
            return Fit(engines[0], len(ids))
        fits = [Fit(engine, len(ids)) for engine in engines if engine.index is None]
        for index in {engine.index for engine in engines if engine.index}:
            names = index.names_of(ids, request.cache_salt)
            told = {engine.number: engine for engine in engines if engine.index is index}
            cached = index.matches(names, told)
            fits += (engine.fit(len(ids), names, cached[n]) for n, engine in told.items())
        best = choose([(fit.engine.current_load(), fit.uncached_tokens) for fit in fits])
        return fits[best]

    def _try_elsewhere(self, engine: Engine, refused: TokenStream) -> bool:
        """Has another engine take a new request for which one has no room."""
        streams = refused.group
        tried = self._refused.setdefault(streams[0], set())
        tried.add(engine)
        others = [each for each in self._serving() if each not in tried]
        if not others or refused.request.engine:
            return False
        engine.client.release(streams)
        self._streams.number(streams)
        self._begin(streams, others)
        return True

    # What has to move.

    async def _move_streams(self) -> None:
        while True:
            drained = any(engine.is_drained for engine in self._engines.values())
            with contextlib.suppress(TimeoutError):  # its last streams may have ended
                async with asyncio.timeout(_DRAIN_LOOK_S if drained else None):
                    await self._changed.wait()
            self._changed.clear()
            await self._tell_ready()
            for place, engine in list(self._engines.items()):
                await self._move_from(engine)
                if engine.is_drained and not engine.client.num_open:
                    self._let_go(place, engine)

    async def _move_from(self, engine: Engine) -> None:
        """Moves what an engine cannot go on with and another can."""
        moved = 0
        for stream in engine.client.open_streams():
            streams = [each for each in stream.group if engine.client.has(each)]
            if stream in streams[:1] and self._has_to_move(engine, stream):
                self._move(engine, streams)
                moved += 1
                if moved % _MOVES_AT_ONCE == 0:
                    await asyncio.sleep(0)

    def _has_to_move(self, engine: Engine, stream: TokenStream) -> bool:
        if engine.client.is_stranger(stream):
            return True
        if engine.serving:
            return False
        hurt = engine.client.is_suspect(stream)
        if not engine.is_drained:
            hurt |= len(stream.tokens) < self._moved_at.get(stream, -_MIN_PROGRESS) + _MIN_PROGRESS
        recovers = engine.client.connected and not engine.is_drained
        return not hurt or engine.lost_for(_RETURN_S if recovers else _PATIENCE_S)

    def _move(self, engine: Engine, streams: Sequence[TokenStream]) -> None:
        """Moves completions of one request, if an engine can take them. If none ever will, they
        fail."""
        model = engine.client.model_of(streams[0])
        others = [each for each in self._serving() if each is not engine]
        others = [each for each in others if each.can_take(streams[0], model)]
        if not others:
            if (
                self.serving  # else another engine may be about to be listed
                and engine.is_gone_for(streams[0])
                and not any(
                    each.may_return_with(model, _RETURN_S)
                    for each in self._engines.values()
                    if each is not engine
                )
            ):
                reason = "the model that this was begun with is not served any more: ask again"
                engine.client.fail(streams, FailedPreconditionError(reason))
            return
        if not engine.is_drained:
            for stream in streams:
                self._moved_at[stream] = len(stream.tokens)
        self.metrics.moved += len(streams)
        records = engine.client.release(streams)
        self._streams.number(streams)
        fit = self._choose(streams[0], others)
        fit.engine.submit(streams[0], fit, partial(fit.engine.client.adopt, streams, records))

    def _let_go(self, place: Place, engine: Engine) -> None:
        """Closes the connection to an engine that is to stop, and has nothing more to do."""
        if engine.listed:
            if engine.client.draining:
                engine.client.disconnect()
            return
        for task in self._tasks.pop(engine):
            task.cancel()
        engine.stop_watching()
        del self._engines[place]
