"""A scheduler without an engine, which gives every open request a token per step, paced or not."""

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


class InstantScheduler(SchedulerServiceServicer):
    """Serves `scheduler.proto` to one frontend without planning or computing anything.

    Args:
        clock: gives the token ids.
    """

    def __init__(self, vocab_size: int, clock: StepClock) -> None:
        self._vocab_size = vocab_size
        self._clock = clock
        self.connected = False
        # The open requests, as columns of equal length.
        self._numbers = np.zeros(0, "<u8")
        self._left = np.zeros(0, np.int64)  # tokens to come
        self._made = np.zeros(0, "<i4")
        self._changed = asyncio.Condition()  # notified when the requests change
        self._going = asyncio.Event()
        self._step_s = 0.0
        self._server = aio.server(options=[("grpc.max_receive_message_length", -1)])
        add_SchedulerServiceServicer_to_server(self, self._server)

    async def start(self, address: str) -> None:
        self._server.add_insecure_port(address)
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(None)

    async def wait_for_requests(self, count: int) -> None:
        """Returns once `count` requests are open."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._numbers) == count)

    def go(self, step_s: float) -> None:
        """Makes the tokens of all open requests, in a step every `step_s` seconds (0: as fast as
        the frontend accepts them)."""
        self._step_s = step_s
        self._going.set()

    async def Connect(  # type: ignore[override]
        self,
        request_iterator: AsyncIterator[pb.FrontendMessage],
        context: aio.ServicerContext[Any, Any],
    ) -> None:
        reader = asyncio.create_task(self._read(request_iterator))
        info = pb.EngineInfo(max_model_len=MAX_MODEL_LEN, vocab_size=self._vocab_size)
        try:
            await context.write(pb.SchedulerMessage(engine_info=info))
            self.connected = True
            while True:
                await self._going.wait()
                await self._run(context)
                self._going.clear()
        finally:
            reader.cancel()

    async def GetLoad(self, request: pb.GetLoadRequest, context: Any) -> pb.GetLoadResponse:
        return pb.GetLoadResponse(running=len(self._numbers))

    async def _run(self, context: aio.ServicerContext[Any, Any]) -> None:
        """Sends steps until no request is open."""
        due = time.monotonic()
        while len(self._numbers):
            await context.write(self._step(self._clock.tick()))
            due += self._step_s
            await asyncio.sleep(max(due - time.monotonic(), 0))

    def _step(self, token_id: int) -> pb.SchedulerMessage:
        """Gives each request a token; ends each request that has all of its tokens."""
        output = pb.StepOutput(
            requests=self._numbers.tobytes(),
            offsets=self._made.tobytes(),
            token_ids=np.full(len(self._numbers), token_id, "<i4").tobytes(),
            started=[pb.Started(request=int(n)) for n in self._numbers[self._made == 0]],
            finished=[
                pb.Finished(request=int(n), cause=pb.FINISH_CAUSE_LENGTH)
                for n in self._numbers[self._left == 1]
            ],
        )
        self._made += 1
        self._left -= 1
        self._keep(self._left > 0)
        return pb.SchedulerMessage(step_output=output)

    def _keep(self, rows: Any) -> None:
        if not rows.all():
            self._numbers = self._numbers[rows]
            self._left = self._left[rows]
            self._made = self._made[rows]

    async def _read(self, messages: AsyncIterator[pb.FrontendMessage]) -> None:
        async for message in messages:
            if message.HasField("submit"):
                submit = message.submit
                self._numbers = np.append(self._numbers, np.uint64(submit.request)).astype("<u8")
                self._left = np.append(self._left, submit.sampling.max_tokens)
                self._made = np.append(self._made, np.int32(0)).astype("<i4")
                async with self._changed:
                    self._changed.notify_all()
            elif message.HasField("abort"):
                self._keep(self._numbers != message.abort.request)
