"""A scheduler without an engine: every open request gets a token per step, paced or flat out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
from grpc import aio

from bench.step_clock import StepClock
from shared.pb import scheduler_pb2 as pb
from shared.pb.scheduler_pb2_grpc import (
    SchedulerServiceServicer,
    add_SchedulerServiceServicer_to_server,
)

MAX_MODEL_LEN = 1 << 20


class _Connection:
    """One frontend's requests, as columns of equal length."""

    def __init__(self) -> None:
        self.going = asyncio.Event()
        self.numbers = np.zeros(0, "<u8")
        self.left = np.zeros(0, np.int64)  # tokens to come
        self.made = np.zeros(0, "<i4")

    def add(self, submit: pb.Submit) -> None:
        self.numbers = np.append(self.numbers, np.uint64(submit.request)).astype("<u8")
        self.left = np.append(self.left, submit.sampling.max_tokens)
        self.made = np.append(self.made, np.int32(0)).astype("<i4")

    def drop(self, number: int) -> None:
        self._keep(self.numbers != number)

    def step(self, token_id: int) -> pb.SchedulerMessage:
        """Gives each request a token; ends those that have all of theirs."""
        output = pb.StepOutput(
            requests=self.numbers.tobytes(),
            offsets=self.made.tobytes(),
            token_ids=np.full(len(self.numbers), token_id, "<i4").tobytes(),
            started=[pb.Started(request=int(n)) for n in self.numbers[self.made == 0]],
            finished=[
                pb.Finished(request=int(n), cause=pb.FINISH_CAUSE_LENGTH)
                for n in self.numbers[self.left == 1]
            ],
        )
        self.made += 1
        self.left -= 1
        self._keep(self.left > 0)
        return pb.SchedulerMessage(step_output=output)

    def _keep(self, rows: Any) -> None:
        if not rows.all():
            self.numbers, self.left, self.made = (
                self.numbers[rows],
                self.left[rows],
                self.made[rows],
            )


class InstantScheduler(SchedulerServiceServicer):
    """Serves `scheduler.proto` without planning or computing anything."""

    def __init__(self, vocab_size: int, clock: StepClock) -> None:
        """`clock` gives the token ids."""
        self._vocab_size = vocab_size
        self._clock = clock
        self._connections: list[_Connection] = []
        self._changed = asyncio.Condition()  # connections or requests
        self._step_s = 0.0
        self._server = aio.server(options=[("grpc.max_receive_message_length", -1)])
        add_SchedulerServiceServicer_to_server(self, self._server)

    async def start(self, address: str) -> None:
        self._server.add_insecure_port(address)
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(None)

    async def wait_for_connections(self, count: int) -> None:
        """Returns once `count` frontends are connected."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._connections) == count)

    async def wait_for_requests(self, count: int) -> None:
        """Returns once `count` requests are open."""
        async with self._changed:
            await self._changed.wait_for(lambda: sum(self.requests_per_connection()) == count)

    def requests_per_connection(self) -> list[int]:
        """The number of open requests of each frontend."""
        return [len(connection.numbers) for connection in self._connections]

    def go(self, step_s: float) -> None:
        """Makes the tokens of all open requests: on each connection, a step every `step_s` seconds
        (0: as fast as the frontend takes them)."""
        self._step_s = step_s
        for connection in self._connections:
            connection.going.set()

    async def Connect(  # type: ignore[override]
        self,
        request_iterator: AsyncIterator[pb.FrontendMessage],
        context: aio.ServicerContext[Any, Any],
    ) -> None:
        connection = _Connection()
        self._connections.append(connection)
        reader = asyncio.create_task(self._read(request_iterator, connection))
        info = pb.EngineInfo(max_model_len=MAX_MODEL_LEN, vocab_size=self._vocab_size)
        try:
            await context.write(pb.SchedulerMessage(engine_info=info))
            async with self._changed:
                self._changed.notify_all()
            while True:
                await connection.going.wait()
                await self._run(connection, context)
                connection.going.clear()
        finally:
            reader.cancel()
            self._connections.remove(connection)

    async def GetLoad(self, request: pb.GetLoadRequest, context: Any) -> pb.GetLoadResponse:
        return pb.GetLoadResponse(running=sum(self.requests_per_connection()))

    async def _run(self, connection: _Connection, context: aio.ServicerContext[Any, Any]) -> None:
        """Steps until no request is open any more."""
        due = time.monotonic()
        while len(connection.numbers):
            await context.write(connection.step(self._clock.tick()))
            due += self._step_s
            await asyncio.sleep(max(due - time.monotonic(), 0))

    async def _read(
        self, messages: AsyncIterator[pb.FrontendMessage], connection: _Connection
    ) -> None:
        async for message in messages:
            if message.HasField("submit"):
                connection.add(message.submit)
                async with self._changed:
                    self._changed.notify_all()
            elif message.HasField("abort"):
                connection.drop(message.abort.request)
