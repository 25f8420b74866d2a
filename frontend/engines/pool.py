"""All engines that a frontend knows. Each request goes to the engine on which it gets its first
token soonest. It moves to another engine if that engine cannot continue it.

A completion moves when its engine is lost, has lost its workers, is drained or is no longer listed.
Another engine with that model computes its tokens again and continues after them, in float32 with
identical tokens. A completion that was on two lost engines in a row, without progress in between,
may have killed them. It stays for a while, so that it does not kill a third engine.
"""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import structlog

from frontend.engines.connection import no_engine
from frontend.engines.deaths import MIN_PROGRESS
from frontend.engines.engine import EngineClient
from frontend.engines.placement import Fit, choose
from frontend.engines.prefix_index import PrefixIndex
from frontend.engines.sources import Endpoint, watch_endpoints
from frontend.engines.streams import Streams
from frontend.engines.token_stream import TokenStream
from frontend.metrics import RequestMetrics
from frontend.request import GenerationRequest
from shared.channels import PLAINTEXT, Dialer
from shared.errors import FailedPreconditionError, InvalidArgumentError, QueueFullError
from shared.pb import scheduler_pb2 as pb

log = structlog.get_logger(__name__)

# How long a completion that was lost twice in a row waits for its scheduler before it moves.
_PATIENCE_S = 10.0
# How long it waits for workers, which load weights. A trial on them shows whether it is to blame.
# A completion whose model no engine has waits this long for an engine that had the model.
_RETURN_S = 300.0
_DRAIN_POLL_S = 0.1  # between checks for completions left on a drained engine
_MOVES_AT_ONCE = 32  # requests, in one iteration of the event loop


class Engines:
    """The engines whose schedulers are at `sources` (`sources.watch_endpoints`)."""

    def __init__(
        self,
        sources: Sequence[str],
        on_ready: Callable[[bool], Awaitable[None]],
        dialer: Dialer = PLAINTEXT,
        metrics: RequestMetrics | None = None,
        check: Callable[[str], object] = lambda _: None,
    ) -> None:
        """Args:
        on_ready: is called with whether any engine serves, at each change.
        check: raises ValueError for an address that must not be called.
        """
        self._sources = sources
        self._on_ready = on_ready
        self._dialer = dialer
        self.metrics = metrics or RequestMetrics()
        self._check = check
        self._streams = Streams()
        self._engines: dict[Endpoint, EngineClient] = {}
        self._tasks: dict[EngineClient, list[asyncio.Task[None]]] = {}
        self._indexes: dict[int, PrefixIndex] = {}  # by block size
        self._was_serving = False
        self._changed = asyncio.Event()  # streams may have to move, or may be able to

    @property
    def serving(self) -> bool:
        """Whether a request that is submitted now would run."""
        return any(engine.serving for engine in self._engines.values())

    @property
    def engine_info(self) -> pb.EngineInfo:
        """The limits of requests that every connected engine can take, and the total capacity of
        the connected engines.

        Raises:
            UnavailableError: there is no connection.
        """
        return _merged([each.info for each in self._engines.values() if each.connected])

    @property
    def limits(self) -> pb.EngineInfo:
        """`engine_info`, or without a connection that of the engines that recover.

        Raises:
            UnavailableError: no engine is connected or recovers.
        """
        engines = self._engines.values()
        connected = [each.info for each in engines if each.connected]
        return _merged(connected or [each.info for each in engines if each.recovers])

    @property
    def model_fingerprints(self) -> list[str]:
        """The fingerprints of the models of engines that are connected or recover.

        Raises:
            UnavailableError: no engine is connected or recovers.
        """
        engines = [each for each in self._engines.values() if each.connected or each.recovers]
        if not engines:
            raise no_engine()
        return sorted({each.model_fingerprint for each in engines})

    def submit(self, request: GenerationRequest) -> list[TokenStream]:
        """Starts the completions of a request, each of which is open until it ends or is closed.

        Raises:
            InvalidArgumentError: no engine has the name that the request gives.
            QueueFullError: too many requests wait for an engine that recovers.
            UnavailableError: no engine is ready or recovers.
        """
        engines = self._candidates(request)
        streams = self._streams.open(request)
        self._submit(streams, engines)
        return streams

    async def run(self) -> None:
        """Finds engines and connects to them until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._move_streams())
            async for endpoints in watch_endpoints(self._sources, self._check):
                self._list(endpoints, tasks)

    # The list of engines.

    def _list(self, endpoints: Sequence[Endpoint], tasks: asyncio.TaskGroup) -> None:
        for endpoint, engine in self._engines.items():
            engine.listed = endpoint in endpoints
        for endpoint in endpoints:
            if endpoint not in self._engines:
                used = {engine.number for engine in self._engines.values()}
                number = min(set(range(len(used) + 1)) - used)
                engine = self._engines[endpoint] = self._engine_at(endpoint, number)
                self._tasks[engine] = [tasks.create_task(engine.connection.run())]
        if len(self._engines) > 1:
            log.info("engines changed", addresses=[each.address for each in endpoints])
            for engine, its_tasks in self._tasks.items():
                if len(its_tasks) == 1:
                    its_tasks.append(tasks.create_task(engine.watch(self._index_of)))
        self._streams.num_engines = max(len(endpoints), 1)
        self._changed.set()

    def _engine_at(self, endpoint: Endpoint, number: int) -> EngineClient:
        dialer = self._dialer
        if endpoint.name and dialer.tls and not dialer.tls.server_name:
            dialer = replace(dialer, tls=replace(dialer.tls, server_name=endpoint.name))
        return EngineClient(
            endpoint.address,
            self._on_engine_ready,
            dialer=dialer,
            metrics=self.metrics,
            streams=self._streams,
            try_elsewhere=self._try_elsewhere,
            number=number,
        )

    def _index_of(self, block_size: int) -> PrefixIndex:
        return self._indexes.setdefault(block_size, PrefixIndex(block_size))

    async def _on_engine_ready(self, engine: EngineClient, ready: bool) -> None:
        if not ready:
            for wait_s in (_PATIENCE_S, _RETURN_S):
                asyncio.get_running_loop().call_later(wait_s, self._changed.set)
        self._changed.set()
        await self._report_ready()

    async def _report_ready(self) -> None:
        self.metrics.num_engines_serving = len(self._serving())
        if self.serving != self._was_serving:
            self._was_serving = self.serving
            await self._on_ready(self.serving)

    def _serving(self) -> list[EngineClient]:
        return [engine for engine in self._engines.values() if engine.serving]

    # Placing new requests.

    def _candidates(self, request: GenerationRequest) -> list[EngineClient]:
        """The engines to which a new request may be sent: those that serve, or else those where the
        request would wait, preferably connected ones."""
        engines = [each for each in self._engines.values() if not each.is_lost or each.recovers]
        if not engines:
            raise no_engine()
        if request.engine:
            if all(engine.name != request.engine for engine in self._engines.values()):
                names = ", ".join(sorted({engine.name for engine in engines}))
                raise InvalidArgumentError("engine", f"unknown name; must be one of {names}")
            engines = [engine for engine in engines if engine.name == request.engine]
            if not engines:
                raise no_engine()
        connected = [engine for engine in engines if engine.connected]
        return [engine for engine in connected if engine.serving] or connected or engines

    def _submit(self, streams: Sequence[TokenStream], engines: Sequence[EngineClient]) -> None:
        """Has the best of `engines` that has room compute the completions of a request."""
        request = streams[0].request
        ids = array("I", request.prompt_ids)
        ids.extend(streams[0].tokens)
        if len(self._engines) == 1:
            engines[0].submit(streams, Fit(len(ids)))
            return
        fits = {engine: Fit(len(ids)) for engine in engines if engine.index is None}
        for index in {engine.index for engine in engines if engine.index}:
            names = index.names_of(ids, request.cache_salt)
            by_number = {engine.number: engine for engine in engines if engine.index is index}
            for number, num_cached in index.matches(names, by_number).items():
                fits[by_number[number]] = by_number[number].fit(len(ids), names, num_cached)
        loads = [(engine.load, fit.uncached_tokens) for engine, fit in fits.items()]
        engine, fit = [*fits.items()][choose(loads)]
        try:
            engine.submit(streams, fit)
        except QueueFullError:  # of an engine that recovers
            if not (others := [each for each in engines if each is not engine]):
                raise
            self._submit(streams, others)

    def _try_elsewhere(self, engine: EngineClient, rejected: TokenStream) -> bool:
        """Moves a new request for which an engine has no room. Returns whether another takes it."""
        streams = rejected.group
        tried = streams[0].rejected_by
        tried.add(engine)
        others = [each for each in self._serving() if each not in tried]
        if not others or rejected.request.engine:
            return False
        engine.release(streams)
        for stream in streams:
            stream.sent = False
        self._submit(streams, others)
        return True

    # Moving completions.

    async def _move_streams(self) -> None:
        while True:
            drained = any(engine.is_drained for engine in self._engines.values())
            with contextlib.suppress(TimeoutError):  # its last streams may have ended
                async with asyncio.timeout(_DRAIN_POLL_S if drained else None):
                    await self._changed.wait()
            self._changed.clear()
            await self._report_ready()
            for endpoint, engine in list(self._engines.items()):
                await self._move_from(engine)
                if engine.is_drained and not engine.num_open:
                    self._remove(endpoint, engine)

    async def _move_from(self, engine: EngineClient) -> None:
        """Moves the completions that an engine cannot continue and another engine can."""
        moved = 0
        for stream in engine.open_streams():
            streams = [each for each in stream.group if engine.has(each)]
            if stream in streams[:1] and self._has_to_move(engine, stream):
                self._move(engine, streams)
                moved += 1
                if moved % _MOVES_AT_ONCE == 0:
                    await asyncio.sleep(0)

    def _has_to_move(self, engine: EngineClient, stream: TokenStream) -> bool:
        if engine.has_other_model(stream):
            return True
        if engine.serving or (stream.request.engine and not stream.sent):
            return False
        suspected = stream.record.is_suspect
        if not engine.is_drained:
            suspected |= len(stream.tokens) < stream.move_goal
        recovers = engine.connected and not engine.is_drained
        return not suspected or engine.lost_for(_RETURN_S if recovers else _PATIENCE_S)

    def _move(self, engine: EngineClient, streams: Sequence[TokenStream]) -> None:
        """Moves completions of one request to an engine that can take them. Fails them if no engine
        ever will."""
        model = engine.model_of(streams[0])
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
                reason = "the model that began this is no longer served; send the request again"
                engine.fail(streams, FailedPreconditionError(reason))
            return
        if streams[0].sent:
            self.metrics.moved += len(streams)
            if not engine.is_drained:
                for stream in streams:
                    stream.move_goal = len(stream.tokens) + MIN_PROGRESS
        engine.release(streams)
        self._submit(streams, others)

    def _remove(self, endpoint: Endpoint, engine: EngineClient) -> None:
        """Ends the connection to a drained engine that has nothing left to do."""
        if engine.listed:
            if engine.draining:
                engine.connection.close()
            return
        for task in self._tasks.pop(engine):
            task.cancel()
        engine.stop_watching()
        del self._engines[endpoint]


def _merged(infos: Sequence[pb.EngineInfo]) -> pb.EngineInfo:
    """The smallest limits of requests, and the total capacity.

    Raises:
        UnavailableError: there is no engine.
    """
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
