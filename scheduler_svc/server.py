"""The scheduler's gRPC edge: frontends' streams in, engine outputs out."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import AsyncIterator

import structlog
from grpc import aio

from scheduler_svc.engine import Engine
from scheduler_svc.frontend_messages import read_sequence, step_output
from scheduler_svc.step import Output
from shared.pb import scheduler_pb2
from shared.pb.scheduler_pb2_grpc import SchedulerServiceServicer

log = structlog.get_logger(__name__)

Context = aio.ServicerContext[scheduler_pb2.FrontendMessage, scheduler_pb2.SchedulerMessage]


class Connection:
    """What one frontend has not been sent yet. Steps that end while a message is being written join
    the next one."""

    def __init__(self) -> None:
        self._outputs: list[Output] = []
        self._news = asyncio.Event()

    def add(self, output: Output) -> None:
        if not self._outputs:
            self._news.set()
        self._outputs.append(output)

    async def write_to(self, context: Context) -> None:
        """Writes what there is to say, for ever."""
        while True:
            await self._news.wait()
            self._news.clear()
            outputs, self._outputs = self._outputs, []
            await context.write(scheduler_pb2.SchedulerMessage(step_output=step_output(outputs)))


class SchedulerServicer(SchedulerServiceServicer):
    """Serves `scheduler.proto` for one engine."""

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._info = scheduler_pb2.EngineInfo()
        self._ready = asyncio.Event()
        self._connections: dict[int, Connection] = {}
        self._numbers = itertools.count()

    def set_engine(self, engine: Engine, info: scheduler_pb2.EngineInfo) -> None:
        """From now on frontends are answered; until then their streams wait."""
        self._engine, self._info = engine, info
        self._ready.set()

    def emit(self, outputs: list[Output]) -> None:
        """Hands outputs to the connections that their sequences came from."""
        for output in outputs:
            connection = self._connections.get(output.seq.key[0])
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
        writer = asyncio.create_task(connection.write_to(context))
        log.info("frontend connected", connection=number)
        try:
            async for message in request_iterator:
                if message.HasField("submit"):
                    seq = read_sequence(number, message.submit, engine.clock())
                    engine.submit(seq, message.submit.n or 1)
                elif message.HasField("abort"):
                    engine.abort((number, message.abort.request))
        finally:
            writer.cancel()
            del self._connections[number]
            engine.abort_connection(number)
            log.info("frontend gone", connection=number)

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
