"""The scheduler's gRPC interface: receives frontends' requests and sends the engine's outputs."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import AsyncIterator, Iterator
from typing import Any

import structlog
from grpc import aio

from scheduler_svc.block_watch import MAX_WATCHES, watched, watches_of
from scheduler_svc.core.sequence import SequenceKey
from scheduler_svc.core.step import Output
from scheduler_svc.engine import Engine
from scheduler_svc.rpc.block_events import event_messages, snapshot_parts
from scheduler_svc.rpc.connection import Context, FrontendConnection
from scheduler_svc.rpc.frontend_messages import read_sequence
from shared.errors import (
    RETRY_AFTER_S,
    DataLossError,
    InternalError,
    QueueFullError,
    StreamEndedError,
)
from shared.pb import scheduler_pb2
from shared.pb.scheduler_pb2_grpc import SchedulerServiceServicer

log = structlog.get_logger(__name__)

_ABORTS_AT_ONCE = 64  # in one turn of the event loop
# Watchers of the cache receive a message at least this often, without events if there are none.
_LOAD_EVERY_S = 0.5
# A frontend is alone for up to 64 s (`frontend.engines.deaths`).
_MAX_ALONE_S = 90.0


class SchedulerServicer(SchedulerServiceServicer):
    """Serves `scheduler.proto` for one engine."""

    def __init__(self) -> None:
        self._engine: asyncio.Future[Engine] = asyncio.get_running_loop().create_future()
        self._failed = False
        self._info = scheduler_pb2.EngineInfo()
        self._state = scheduler_pb2.EngineState(serving=True)
        self._connections: dict[int, FrontendConnection] = {}
        self._accepting = asyncio.Lock()  # held while a frontend is connected alone
        # A message about the cache has up to 512 events, so each turn of the loop makes one.
        self._watch_turn = asyncio.Lock()
        self._numbers = itertools.count()

    def start(self, engine: Engine, info: scheduler_pb2.EngineInfo) -> None:
        """Answers frontends, whose streams wait for this call."""
        self._info = info
        self._engine.set_result(engine)

    def fail(self) -> None:
        """Makes streams end as if the process had died. It does end, because its engine failed."""
        self._failed = True

    def set_serving(self, serving: bool) -> None:
        """Tells all frontends whether requests wait for workers."""
        self._state.serving = serving
        self._send_state()

    def drain(self) -> None:
        """Tells all frontends that this scheduler is about to stop, and ends its other streams. A
        scheduler that has failed announces nothing, as if it had died."""
        if not self._failed:
            self._state.draining = True
            self._send_state()

    def _send_state(self) -> None:
        for connection in self._connections.values():
            connection.send_state(self._state)

    def emit(self, outputs: list[Output]) -> None:
        """Hands outputs to the connections that their sequences came from."""
        for output in outputs:
            connection = self._connections.get(output.seq.key.connection)
            if connection is not None:
                connection.add(output)

    async def Connect(  # type: ignore[override]  # writes to the context instead of yielding
        self,
        request_iterator: AsyncIterator[scheduler_pb2.FrontendMessage],
        context: Context,
    ) -> None:
        engine = await asyncio.shield(self._engine)
        async with self._accepting:
            connection = self._accept()
        await self._serve(connection, request_iterator, context, engine)

    async def ConnectAlone(  # type: ignore[override]  # writes to the context instead of yielding
        self,
        request_iterator: AsyncIterator[scheduler_pb2.FrontendMessage],
        context: Context,
    ) -> None:
        engine = await asyncio.shield(self._engine)
        async with self._accepting:
            log.warning("ending all connections: a frontend must be alone to try a request")
            others = [*self._connections.values()]
            for other in others:
                other.cut_off("another frontend must be alone")
            for other in others:
                await other.ended.wait()
            await engine.rest()
            connection = self._accept()
            loop, reason = asyncio.get_running_loop(), "it was alone for too long"
            loop.call_later(_MAX_ALONE_S, connection.cut_off, reason)
            await self._serve(connection, request_iterator, context, engine)

    def _accept(self) -> FrontendConnection:
        connection = FrontendConnection(next(self._numbers))
        self._connections[connection.number] = connection
        connection.send_state(self._state)
        return connection

    async def _serve(
        self,
        connection: FrontendConnection,
        messages: AsyncIterator[scheduler_pb2.FrontendMessage],
        context: Context,
        engine: Engine,
    ) -> None:
        number = connection.number
        tasks: list[asyncio.Task[None]] = []
        log.info("frontend connected", connection=number)
        try:
            await context.write(scheduler_pb2.SchedulerMessage(engine_info=self._info))
            reader = asyncio.create_task(self._read(number, messages, engine))
            tasks += reader, asyncio.create_task(connection.write_to(context))
            ends: tuple[asyncio.Future[Any], ...] = (*tasks, connection.closed)
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            if self._failed:
                raise InternalError("internal error") from None
            raise StreamEndedError("this scheduler is stopping") from None
        finally:
            for task in tasks:  # first: nothing may be submitted after the aborts below
                task.cancel()
            more = True
            while more:
                more = engine.abort_connection(number, _ABORTS_AT_ONCE)
                await asyncio.sleep(0)  # steps of other requests continue
            del self._connections[number]
            connection.ended.set()
            log.info("frontend disconnected", connection=number)
            await asyncio.gather(*tasks, return_exceptions=True)
        if connection.closed.done():
            raise StreamEndedError(f"{connection.closed.result()}: connect again")
        if not reader.cancelled():
            reader.result()

    async def _read(
        self,
        number: int,
        messages: AsyncIterator[scheduler_pb2.FrontendMessage],
        engine: Engine,
    ) -> None:
        """Handles the messages of a connection until its frontend sends no more."""
        async for message in messages:
            if message.HasField("submit"):
                seq = read_sequence(number, message.submit, engine.clock())
                engine.submit(seq, message.submit.n or 1)
            elif message.HasField("abort"):
                engine.abort(SequenceKey(number, message.abort.request))

    async def GetLoad(
        self, request: scheduler_pb2.GetLoadRequest, context: object
    ) -> scheduler_pb2.GetLoadResponse:
        return self._load(await asyncio.shield(self._engine))

    def _load(self, engine: Engine) -> scheduler_pb2.GetLoadResponse:
        scheduler, blocks, now = engine.scheduler, engine.scheduler.blocks, engine.clock()
        return scheduler_pb2.GetLoadResponse(
            waiting=scheduler.num_waiting,
            waiting_tokens=scheduler.num_waiting_tokens,
            running=scheduler.num_running,
            blocks=blocks.num_blocks,
            blocks_free=blocks.num_free_blocks - blocks.num_cached_blocks,
            blocks_cached=blocks.num_cached_blocks,
            blocks_used=blocks.num_blocks - blocks.num_free_blocks,
            tokens_per_s=engine.load.tokens_per_s(now),
            step_time_s=engine.load.step_time_s,
            waiting_uncached_tokens=scheduler.num_uncached_tokens,
            prompt_token_s=engine.load.prompt_token_s,
            queue_s=engine.load.queue_s(now),
            frontends=len(self._connections),
            evicted_blocks=blocks.num_evictions,
            swapped=scheduler.swaps.num_swapped,
            tier_blocks=len(blocks.tier),
            num_stages=scheduler.num_stages,
            **dataclasses.asdict(scheduler.stats),
        )

    async def WatchBlocks(  # type: ignore[override]  # writes to the context instead of yielding
        self,
        request: scheduler_pb2.WatchBlocksRequest,
        context: aio.ServicerContext[scheduler_pb2.WatchBlocksRequest, scheduler_pb2.BlockEvents],
    ) -> None:
        engine = await asyncio.shield(self._engine)
        blocks = engine.scheduler.blocks

        async def send(messages: Iterator[scheduler_pb2.BlockEvents]) -> None:
            while True:
                async with self._watch_turn:
                    await asyncio.sleep(0)
                    message = next(messages, None)
                if message is None:
                    return
                message.load.CopyFrom(self._load(engine))
                await context.write(message)

        if len(watches_of(blocks)) >= MAX_WATCHES:
            raise QueueFullError(
                f"{MAX_WATCHES} callers watch the prefix cache, and no more may", RETRY_AFTER_S
            )
        with watched(blocks) as watch:
            await send(snapshot_parts(blocks.stored_blocks()))
            while not (watch.fell_behind or self._state.draining):
                await send(event_messages(await watch.read(_LOAD_EVERY_S)))
        if self._state.draining:
            raise StreamEndedError("this scheduler is stopping")
        raise DataLossError("too many events were not read: watch again")
