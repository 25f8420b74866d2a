"""`python -m bench --mode scheduler`: measures the scheduler's time, with an instant worker.

These are steps per second over a scheduler's gRPC stream while all sequences decode. The scheduler
reads its other settings from NANO_<NAME>. See docs/results/cpu.md.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from grpc import aio
from rich.console import Console

from bench.instant_worker import VOCAB_SIZE, SchedulerUnderTest, Sizes, running_scheduler
from bench.machine import cpu_s
from bench.report import check_minimum, figure_rows, mode_parser, print_table
from bench.workload import BenchError
from shared.pb import scheduler_pb2 as pb

if TYPE_CHECKING:
    from shared.pb.scheduler_pb2_grpc import SchedulerServiceAsyncStub

_BLOCK_SIZE = 64
_UNIQUE = 16  # tokens at the end of each prompt that no other prompt shares
_MIN_ROOM = 5000  # steps
_ROWS = (
    ("steps/s", "steps_per_s", "{:,.1f}"),
    ("tokens/s", "tokens_per_s", "{:,.0f}"),
    ("mean batch, sequences", "mean_batch", "{:.1f}"),
    ("CPU per step: scheduler, ms", "scheduler_cpu_ms", "{:.2f}"),
)

Call = aio.StreamStreamCall[pb.FrontendMessage, pb.SchedulerMessage]


@dataclass(frozen=True)
class Decode:
    """One window of steps."""

    num_seqs: int
    steps_per_s: float
    tokens_per_s: float  # as they arrive at the client
    mean_batch: float
    scheduler_cpu_ms: float  # per step, of all threads


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
    cpu, tokens = cpu_s(scheduler.scheduler_pid), connection.num_tokens
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
        scheduler_cpu_ms=1e3 * (cpu_s(scheduler.scheduler_pid) - cpu) / done,
    )


class SchedulerConnection:
    """A stream to the scheduler. Requests are numbered 0, 1, 2, ... in the order of `submit`."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._numbers = itertools.count()
        self.num_tokens = 0  # of all requests together
        self.num_started = 0  # requests with a token

    async def submit(self, prompt: npt.NDArray[np.int32], max_tokens: int) -> None:
        number = next(self._numbers)
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


@contextlib.asynccontextmanager
async def connect(stub: SchedulerServiceAsyncStub) -> AsyncIterator[SchedulerConnection]:
    """Opens a stream; the scheduler aborts the stream's requests when it ends."""
    call = stub.Connect()
    try:
        await call.read()  # EngineInfo
        yield SchedulerConnection(call)
    finally:
        call.cancel()


def parse_args(args: list[str]) -> argparse.Namespace:
    parser = mode_parser("scheduler", __doc__, model=None)
    add = parser.add_argument
    add("--num-seqs", type=int, nargs="+", default=[256, 1024], help="%(default)s")
    add("--context", type=int, default=600, help="tokens per sequence, %(default)s")
    add("--steps", type=int, default=600, help="steps of a round, %(default)s")
    add("--rounds", type=int, default=3, help="rounds, of which the median counts, %(default)s")
    options = parser.parse_args(args)
    check_minimum(parser, options, 1, ["num_seqs", "context", "steps", "rounds"])
    return options


def measure(options: argparse.Namespace, console: Console) -> Iterator[dict[str, Any]]:
    """Yields the figures of each number of sequences.

    Raises:
        BenchError: a figure cannot be measured with these options.
        AioRpcError: the scheduler was lost.
    """
    decode = []
    for num_seqs in options.num_seqs:
        with console.status(f"{num_seqs} sequences decode"):
            rounds = asyncio.run(
                measure_decode(num_seqs, options.context, options.steps, options.rounds)
            )
        rounds.sort(key=lambda each: each.steps_per_s)
        # The lower one of two in the middle, so that all figures are of one round.
        decode.append(dataclasses.asdict(rounds[(len(rounds) - 1) // 2]))
        yield {"decode": decode}
    title = "all sequences decode, over gRPC, with a worker that answers at once"
    columns = ["", *(f"{each['num_seqs']:,}" for each in decode)]
    print_table(console, title, columns, figure_rows(decode, _ROWS))
