"""`python -m bench --mode scheduler`: measures the scheduler's time, with an instant worker.

Steps per second over a scheduler's gRPC stream while all sequences decode, and the time to plan,
encode and apply a step in this process. The scheduler reads its other settings from NANO_<NAME>.
See docs/results/cpu.md.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import gc
import itertools
import statistics
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from collections.abc import Sequence as Seq
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
from scheduler_svc.core.admission import Limits
from scheduler_svc.core.block_manager import BlockManager
from scheduler_svc.core.sampling import SamplingParams
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.step import Answer, Step
from scheduler_svc.rpc.step_encoding import encode_step
from shared.pb import scheduler_pb2 as pb

if TYPE_CHECKING:
    from shared.pb.scheduler_pb2_grpc import SchedulerServiceAsyncStub

_BLOCK_SIZE = 64
_UNIQUE = 16  # tokens at the end of each prompt that no other prompt shares
_MIN_ROOM = 5000  # steps
_WAITING_PROMPT = 16  # tokens
_WARM_UP = 20  # steps
_PLANNING_CONTEXTS = (100, 4000)  # besides --context
_DECODE_ROWS = (
    ("steps/s", "steps_per_s", "{:,.1f}"),
    ("tokens/s", "tokens_per_s", "{:,.0f}"),
    ("mean batch, sequences", "mean_batch", "{:.1f}"),
    ("CPU per step: scheduler, ms", "scheduler_cpu_ms", "{:.2f}"),
)
_PLANNING_ROWS = (
    ("waiting", "waiting", "{:,}"),
    ("context", "context", "{:,}"),
    ("plan, ms", "plan_ms_p50", "{:.3f}"),
    ("apply, ms", "apply_ms_p50", "{:.3f}"),
    ("plan and apply, ms", "plan_and_apply_ms_p50", "{:.3f}"),
    ("p99", "plan_and_apply_ms_p99", "{:.3f}"),
    ("encode, ms", "encode_ms_p50", "{:.3f}"),
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


@dataclass(frozen=True)
class Planning:
    """Wall time per step, in milliseconds, while all sequences decode one step ahead."""

    num_seqs: int
    waiting: int
    context: int  # tokens, halfway through the measurement
    plan_ms_p50: float
    apply_ms_p50: float
    plan_and_apply_ms_p50: float  # of each step's sum of both times
    plan_and_apply_ms_p99: float
    encode_ms_p50: float


def measure_planning(
    cases: Seq[tuple[int, int]], num_seqs: int, steps: int, rounds: int
) -> list[Planning]:
    """Measures `rounds` times `steps` steps of each case (waiting sequences, context). The cases
    take turns, so that other work on the machine affects all of them."""
    samples: list[list[tuple[float, float, float]]] = [[] for _ in cases]
    for _ in range(rounds):
        for found, (waiting, context) in zip(samples, cases, strict=True):
            found += _DecodingBatch(num_seqs, waiting, context, steps).run(steps)
    return [
        _summary(num_seqs, *case, np.array(found))
        for case, found in zip(cases, samples, strict=True)
    ]


class _DecodingBatch:
    """A scheduler with `num_seqs` sequences past their prompts, and `waiting` in the queue."""

    def __init__(self, num_seqs: int, waiting: int, context: int, steps: int) -> None:
        prompt_len = max(context - steps // 2, 1)
        max_tokens = 2 * steps + prompt_len + 10 * _WARM_UP  # more than a run makes
        blocks_each = (prompt_len + max_tokens) // _BLOCK_SIZE + 1
        limits = Limits(
            max_num_seqs=num_seqs,
            max_num_batched_tokens=max(2048, 2 * num_seqs),
            max_model_len=blocks_each * _BLOCK_SIZE,
            max_waiting=num_seqs + waiting,
            vocab_size=VOCAB_SIZE,
        )
        self._scheduler = Scheduler(limits, BlockManager(num_seqs * blocks_each, _BLOCK_SIZE))
        self._in_flight: deque[Step] = deque()
        self._step_ids = itertools.count(1)
        rng = np.random.default_rng(0)
        shared = rng.integers(VOCAB_SIZE, size=prompt_len - 1)
        for number in range(num_seqs):
            # Prompts differ in one token. The rest is in the cache, so that all start together.
            prompt = [*shared.tolist(), number % VOCAB_SIZE]
            self._add(number, prompt, max_tokens)
            if number == 0:
                while not self._scheduler.stats.sampled_tokens:
                    self._step()
        while self._scheduler.num_running < num_seqs:
            self._step()
        for number in range(waiting):
            prompt = rng.integers(VOCAB_SIZE, size=_WAITING_PROMPT).tolist()
            self._add(num_seqs + number, prompt, max_tokens)
        for _ in range(_WARM_UP):
            self._step()

    def run(self, steps: int) -> list[tuple[float, float, float]]:
        """Returns the seconds to plan, encode and apply each step.

        Raises:
            BenchError: a step was not a decode of all sequences.
        """
        gc.collect()
        before = self._scheduler.stats.step_tokens
        samples = [self._step() for _ in range(steps)]
        done = self._scheduler.stats.step_tokens - before
        if done != steps * self._scheduler.limits.max_num_seqs:
            raise BenchError(f"{steps} steps had {done} tokens; not all sequences decoded")
        return samples

    def _step(self) -> tuple[float, float, float]:
        """Plans a step, then applies the answer to the previous one."""
        began = time.perf_counter()
        step = self._scheduler.schedule(began)
        planned = time.perf_counter()
        encoded = planned
        if step is not None:
            encode_step(step, _BLOCK_SIZE, 1, next(self._step_ids))
            encoded = time.perf_counter()
            self._in_flight.append(step)
        if len(self._in_flight) < 2 and step is not None:
            return planned - began, encoded - planned, 0.0
        oldest = self._in_flight.popleft()
        answer = Answer([7] * len(oldest.rows))
        received = time.perf_counter()
        self._scheduler.apply(oldest, answer)
        return planned - began, encoded - planned, time.perf_counter() - received

    def _add(self, number: int, prompt: list[int], max_tokens: int) -> None:
        params = SamplingParams(max_tokens, temperature=0.6, seed=number)
        end = self._scheduler.add(Sequence((0, number), prompt, params))
        if end is not None:
            raise BenchError(f"sequence {number} was rejected: {end.message}")


def _summary(
    num_seqs: int, waiting: int, context: int, seconds: npt.NDArray[np.float64]
) -> Planning:
    """Computes the figures from `seconds` [steps, 3], the times to plan, encode and apply."""
    plan, encode, apply = 1e3 * seconds.T
    both_p50, both_p99 = np.percentile(plan + apply, (50, 99)).tolist()
    medians = float(np.median(plan)), float(np.median(apply))
    return Planning(
        num_seqs, waiting, context, *medians, both_p50, both_p99, float(np.median(encode))
    )


def parse_args(args: list[str]) -> argparse.Namespace:
    parser = mode_parser("scheduler", __doc__)
    add = parser.add_argument
    add("--num-seqs", type=int, nargs="+", default=[256, 1024], help="%(default)s")
    add("--context", type=int, default=600, help="tokens per sequence, %(default)s")
    add("--steps", type=int, default=600, help="steps of a round, %(default)s")
    add("--rounds", type=int, default=3, help="rounds, of which the median counts, %(default)s")
    add("--waiting", type=int, nargs="+", default=[0, 1000, 10_000], help="%(default)s")
    options = parser.parse_args(args)
    check_minimum(parser, options, 1, ["num_seqs", "context", "steps", "rounds"])
    check_minimum(parser, options, 0, ["waiting"])
    return options


def measure(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Measures decoding and planning; returns the figures for the JSON.

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
        decode.append(dataclasses.asdict(_median_round(rounds)))
    with console.status("planning in this process"):
        cases = [(waiting, options.context) for waiting in options.waiting]
        cases += [(options.waiting[0], context) for context in _PLANNING_CONTEXTS]
        found = measure_planning(
            cases, options.num_seqs[0], max(1, options.steps // 6), options.rounds
        )
    planning = [dataclasses.asdict(each) for each in found]

    title = "all sequences decode, over gRPC, with a worker that answers at once"
    columns = ["", *(f"{each['num_seqs']:,}" for each in decode)]
    print_table(console, title, columns, figure_rows(decode, _DECODE_ROWS))
    title = f"a step in process, {options.num_seqs[0]} sequences: medians"
    columns = ["", *map(str, range(1, len(planning) + 1))]
    print_table(console, title, columns, figure_rows(planning, _PLANNING_ROWS))
    return {
        "steps_per_s": decode[0]["steps_per_s"],
        "tokens_per_s": decode[0]["tokens_per_s"],
        "plan_ms_p50": planning[0]["plan_and_apply_ms_p50"],
        "decode": decode,
        "planning": planning,
    }


def _median_round(rounds: Seq[Decode]) -> Decode:
    """The round with the median rate, the lower of two, so that all figures are of one round."""
    rate = statistics.median_low(each.steps_per_s for each in rounds)
    return next(each for each in rounds if each.steps_per_s == rate)
