"""Measures steps per second while all sequences decode, over a scheduler's gRPC stream."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from grpc import aio

from bench.errors import BenchError
from bench.instant_worker import VOCAB_SIZE
from bench.machine import cpu_s
from bench.scheduler_processes import SchedulerUnderTest, Sizes, running_scheduler
from shared.pb import scheduler_pb2 as pb

if TYPE_CHECKING:
    from shared.pb.scheduler_pb2_grpc import SchedulerServiceAsyncStub

_UNIQUE = 16  # tokens at the end of each prompt that no other prompt shares
_MIN_ROOM = 5000  # steps
_BLOCK_SIZE = 64

Call = aio.StreamStreamCall[pb.FrontendMessage, pb.SchedulerMessage]


@dataclass(frozen=True)
class Decode:
    """One window of steps. CPU times cover all threads of a process."""

    num_seqs: int
    steps_per_s: float
    tokens_per_s: float  # as they arrive at the client
    mean_batch: float
    mean_context: float  # tokens in the middle of the window
    scheduler_cpu_ms: float  # per step
    worker_cpu_ms: float
    client_cpu_ms: float


async def measure_decode(num_seqs: int, context: int, steps: int, rounds: int) -> list[Decode]:
    """Measures `rounds` windows of about `steps` steps. In the middle of a window, contexts are
    about `context` tokens long. Each window has new sequences in the same two processes.

    Raises:
        BenchError: the scheduler failed, or a step was not a decode of all sequences.
    """
    # Sequences decode before the last one starts, and while this process waits for a core. So there
    # is room for twice the window and for more than a second.
    max_tokens = context + max(2 * steps, _MIN_ROOM)
    sizes = Sizes(
        max_num_seqs=num_seqs,
        max_num_batched_tokens=max(2048, 2 * num_seqs),
        max_model_len=max_tokens,
        num_blocks=num_seqs * (max_tokens // _BLOCK_SIZE + 1),
        block_size=_BLOCK_SIZE,
    )
    rng = np.random.default_rng(0)
    prompt_len = max(context - steps // 2, _UNIQUE + 1)
    found = []
    async with running_scheduler(sizes) as scheduler:
        for _ in range(rounds):
            prompts = _prompts(rng, num_seqs, prompt_len)
            async with connect(scheduler.stub) as connection:
                await _start(connection, prompts, max_tokens - prompt_len)
                found.append(await _window(scheduler, connection, num_seqs, steps))
            while (await scheduler.load()).running:
                pass  # the scheduler is still removing the aborted sequences
    return found


def _prompts(rng: np.random.Generator, num_seqs: int, prompt_len: int) -> npt.NDArray[np.int32]:
    """Makes prompts [num_seqs, prompt_len] that differ only in their ends."""
    prompts = rng.integers(VOCAB_SIZE, size=(num_seqs, prompt_len), dtype=np.int32)
    prompts[:, :-_UNIQUE] = prompts[0, :-_UNIQUE]
    return prompts


async def _start(
    connection: SchedulerConnection, prompts: npt.NDArray[np.int32], max_tokens: int
) -> None:
    """Submits all sequences and returns once they all decode. The first starts alone, so that the
    others find their prompt in the cache and start together. Otherwise contexts in a window would
    differ by a prompt's length."""
    await connection.submit(prompts[0], max_tokens)
    await connection.read()
    for prompt in prompts[1:]:
        await connection.submit(prompt, max_tokens)
    await connection.read_until(lambda: connection.num_started == len(prompts))


async def _window(
    scheduler: SchedulerUnderTest, connection: SchedulerConnection, num_seqs: int, steps: int
) -> Decode:
    before, started = await scheduler.load(), time.perf_counter()
    cpu = cpu_s(scheduler.scheduler_pid), cpu_s(scheduler.worker_pid), time.process_time()
    tokens, context = connection.num_tokens, connection.mean_context()
    await connection.read_until(lambda: connection.num_tokens >= tokens + steps * num_seqs)
    after, ended = await scheduler.load(), time.perf_counter()
    done = after.steps - before.steps
    if (before.waiting, after.waiting, after.running) != (0, 0, num_seqs):
        raise BenchError(f"{after.running} of {num_seqs} sequences ran, {after.waiting} waited")
    return Decode(
        num_seqs=num_seqs,
        steps_per_s=done / (ended - started),
        tokens_per_s=(connection.num_tokens - tokens) / (ended - started),
        mean_batch=(after.step_sequences - before.step_sequences) / done,
        mean_context=(context + connection.mean_context()) / 2,
        scheduler_cpu_ms=1e3 * (cpu_s(scheduler.scheduler_pid) - cpu[0]) / done,
        worker_cpu_ms=1e3 * (cpu_s(scheduler.worker_pid) - cpu[1]) / done,
        client_cpu_ms=1e3 * (time.process_time() - cpu[2]) / done,
    )


class SchedulerConnection:
    """A stream to the scheduler. Requests are numbered 0, 1, 2, ... in the order of `submit`."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._prompt_lens: list[int] = []  # of all submitted requests
        self.num_tokens = 0  # of all requests together
        self.num_started = 0  # requests with a token

    async def submit(self, prompt: npt.NDArray[np.int32], max_tokens: int) -> None:
        number = len(self._prompt_lens)
        self._prompt_lens.append(len(prompt))
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
        self.num_tokens += len(np.frombuffer(output.requests, "<u8"))
        self.num_started += len(output.started)
        for finished in output.finished:
            cause = pb.FinishCause.Name(finished.cause)
            raise BenchError(f"a sequence ended with {cause}: {finished.message}")

    async def read_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self.read()

    def mean_context(self) -> float:
        """The current number of tokens per sequence, averaged over all of them."""
        return (sum(self._prompt_lens) + self.num_tokens) / len(self._prompt_lens)


@contextlib.asynccontextmanager
async def connect(stub: SchedulerServiceAsyncStub) -> AsyncIterator[SchedulerConnection]:
    """Opens a stream; the scheduler aborts the stream's requests when it ends."""
    call = stub.Connect()
    try:
        await call.read()  # EngineInfo
        yield SchedulerConnection(call)
    finally:
        call.cancel()
