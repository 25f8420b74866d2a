"""The scheduler's gRPC edge: frontends' streams in, engine outputs out."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import AsyncIterator

import structlog
from grpc import aio

from scheduler_svc.edge.frontend_messages import read_sequence, step_output
from scheduler_svc.engine import Engine
from scheduler_svc.sequence import SequenceKey
from scheduler_svc.step import Output
from shared.errors import UnavailableError
from shared.pb import scheduler_pb2
from shared.pb.scheduler_pb2_grpc import SchedulerServiceServicer

log = structlog.get_logger(__name__)

# Outputs that may wait for a frontend to read: about five seconds of a busy engine, some 50 MB.
_MAX_UNREAD = 1 << 18
# What one turn of the event loop may do.
_OUTPUTS_AT_ONCE = 4096
_ABORTS_AT_ONCE = 64

Context = aio.ServicerContext[scheduler_pb2.FrontendMessage, scheduler_pb2.SchedulerMessage]


class Connection:
    """Buffers the outputs that one frontend has not been sent yet. Those that arrive while a
    message is being written join the next one. If the frontend falls too far behind, they are
    dropped and `overflow` is done."""

    def __init__(self) -> None:
        self._outputs: list[Output] = []
        self._serving = self._told = True  # what is, and what the frontend knows
        self._news = asyncio.Event()
        self.overflow: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def set_serving(self, serving: bool) -> None:
        self._serving = serving
        self._news.set()

    def add(self, output: Output) -> None:
        if self.overflow.done():
            return
        if not self._outputs:
            self._news.set()
        self._outputs.append(output)
        if len(self._outputs) > _MAX_UNREAD:
            self._outputs.clear()
            self.overflow.set_result(None)

    async def write_to(self, context: Context) -> None:
        """Writes messages as there is news, for ever."""
        while True:
            await self._news.wait()
            self._news.clear()
            if self._told != self._serving:
                self._told = self._serving
                state = scheduler_pb2.EngineState(serving=self._told)
                await context.write(scheduler_pb2.SchedulerMessage(engine_state=state))
            if self._outputs:
                outputs = self._outputs[:_OUTPUTS_AT_ONCE]
                del self._outputs[:_OUTPUTS_AT_ONCE]
                if self._outputs:
                    self._news.set()
                message = scheduler_pb2.SchedulerMessage(step_output=step_output(outputs))
                await context.write(message)


class SchedulerServicer(SchedulerServiceServicer):
    """Serves `scheduler.proto` for one engine."""

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._info = scheduler_pb2.EngineInfo()
        self._ready = asyncio.Event()
        self._serving = True
        self._connections: dict[int, Connection] = {}
        self._numbers = itertools.count()

    def set_engine(self, engine: Engine, info: scheduler_pb2.EngineInfo) -> None:
        """Starts answering frontends, whose streams wait until then."""
        self._engine, self._info = engine, info
        self._ready.set()

    def set_serving(self, serving: bool) -> None:
        """Tells all frontends whether requests wait for workers."""
        self._serving = serving
        for connection in self._connections.values():
            connection.set_serving(serving)

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
        engine = await self._started_engine()
        await context.write(scheduler_pb2.SchedulerMessage(engine_info=self._info))
        number = next(self._numbers)
        connection = self._connections[number] = Connection()
        connection.set_serving(self._serving)
        reader = asyncio.create_task(_read(number, request_iterator, engine))
        writer = asyncio.create_task(connection.write_to(context))
        log.info("frontend connected", connection=number)
        try:
            ends = (reader, writer, connection.overflow)
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            del self._connections[number]
            more = True
            while more:
                more = engine.abort_connection(number, _ABORTS_AT_ONCE)
                await asyncio.sleep(0)  # others' steps go on
            log.info("frontend gone", connection=number)
            reader.cancel()
            writer.cancel()
            await asyncio.gather(reader, writer, return_exceptions=True)
        if connection.overflow.done():
            # It keeps what it has, and submits the rest again once it reads this.
            raise UnavailableError(f"more than {_MAX_UNREAD} outputs were not read: connect again")
        if not reader.cancelled():
            reader.result()

    async def GetLoad(
        self, request: scheduler_pb2.GetLoadRequest, context: object
    ) -> scheduler_pb2.GetLoadResponse:
        engine = await self._started_engine()
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
            step_time_s=engine.load.step_time_s(now),
            frontends=len(self._connections),
            evicted_blocks=blocks.num_evictions,
            **dataclasses.asdict(scheduler.stats),
        )

    async def _started_engine(self) -> Engine:
        await self._ready.wait()
        assert self._engine is not None
        return self._engine


async def _read(
    number: int, messages: AsyncIterator[scheduler_pb2.FrontendMessage], engine: Engine
) -> None:
    """Handles a frontend's messages until it sends no more."""
    async for message in messages:
        if message.HasField("submit"):
            seq = read_sequence(number, message.submit, engine.clock())
            engine.submit(seq, message.submit.n or 1)
        elif message.HasField("abort"):
            engine.abort(SequenceKey(number, message.abort.request))
