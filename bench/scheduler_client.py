"""Submits sequences straight to a scheduler, as a frontend does, and times the answers."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from grpc import aio

from bench.errors import BenchError
from shared.pb import scheduler_pb2 as pb

if TYPE_CHECKING:
    from shared.pb.scheduler_pb2_grpc import SchedulerServiceAsyncStub

Call = aio.StreamStreamCall[pb.FrontendMessage, pb.SchedulerMessage]


class SchedulerConnection:
    """A stream to the scheduler. Requests are numbered 0, 1, 2, ... in the order of `submit`.

    Messages are read, and their times taken, only while `read` is awaited.
    """

    def __init__(self, call: Call) -> None:
        self._call = call
        self._prompt_lens: list[int] = []
        self.sent: list[float] = []  # when each was submitted
        self.messages: list[
            tuple[float, npt.NDArray[np.uint64]]
        ] = []  # time, request of each token
        self.num_tokens = 0  # of all requests together
        self.num_started = 0  # requests with a token

    async def submit(self, prompt: npt.NDArray[np.int32], max_tokens: int) -> None:
        number = len(self.sent)
        self._prompt_lens.append(len(prompt))
        self.sent.append(time.perf_counter())
        submit = pb.Submit(
            request=number,
            prompt_ids=prompt.astype("<i4").tobytes(),
            sampling=pb.TokenSampling(temperature=0.6, seed=number, max_tokens=max_tokens),
        )
        await self._call.write(pb.FrontendMessage(submit=submit))

    async def read(self) -> None:
        """Reads one message.

        Raises:
            BenchError: a sequence or the stream ended, which must not happen in a benchmark.
        """
        message = await self._call.read()
        if not isinstance(message, pb.SchedulerMessage):
            raise BenchError(f"the scheduler ended the stream: {await self._call.details()}")
        output = message.step_output
        requests = np.frombuffer(output.requests, "<u8")
        self.messages.append((time.perf_counter(), requests))
        self.num_tokens += len(requests)
        self.num_started += len(output.started)
        for finished in output.finished:
            cause = pb.FinishCause.Name(finished.cause)
            raise BenchError(f"a sequence ended with {cause}: {finished.message}")

    async def read_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self.read()

    def mean_context(self) -> float:
        """The current number of tokens per sequence, averaged over all of them."""
        return (sum(self._prompt_lens) + self.num_tokens) / len(self.sent)

    def arrivals(self) -> list[npt.NDArray[np.float64]]:
        """The arrival times of each request's tokens, in the order of requests."""
        times = np.repeat([t for t, _ in self.messages], [len(r) for _, r in self.messages])
        requests = np.concatenate([r for _, r in self.messages])
        order = np.argsort(requests, kind="stable")
        ends = np.cumsum(np.bincount(requests.astype(np.int64), minlength=len(self.sent)))
        return np.split(times[order], ends[:-1])


@contextlib.asynccontextmanager
async def connect(stub: SchedulerServiceAsyncStub) -> AsyncIterator[SchedulerConnection]:
    """Opens a stream; everything submitted on it is aborted when it ends."""
    call = stub.Connect()
    try:
        await call.read()  # EngineInfo
        yield SchedulerConnection(call)
    finally:
        call.cancel()
