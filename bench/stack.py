"""Runs requests through the public gRPC API, as the whole workload at once or one at a time."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

from rich.console import Console

from bench.metrics import Metrics, Trace, summarize
from bench.workload import (
    LONG_PROMPT,
    REPEATS,
    STREAM_PROMPT,
    STREAM_TOKENS,
    TEMPERATURE,
    BenchError,
    WorkloadRequest,
    random_request,
)
from nano_vllm_grpc import AsyncLLM, ModelInfo, PrivateStack, SamplingParams
from shared.config import ServiceSettings, load_settings
from shared.pb import scheduler_pb2
from shared.pb.scheduler_pb2_grpc import SchedulerServiceStub

# Parameters without effect, which replace a model's own defaults. Only the temperature remains.
PLAIN = SamplingParams(top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0)
_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class EngineStats:
    """Counters, named as in `GetLoadResponse`."""

    steps: int
    step_sequences: int
    step_tokens: int
    preemptions: int
    cached_prompt_tokens: int

    @classmethod
    def of(cls, counters: object) -> Self:
        """Copies the counters from an object that has them as attributes."""
        return cls(**{field.name: getattr(counters, field.name) for field in fields(cls)})

    def since(self, before: EngineStats) -> EngineStats:
        names = [field.name for field in fields(self)]
        return EngineStats(**{n: getattr(self, n) - getattr(before, n) for n in names})

    @property
    def mean_batch(self) -> float:
        """Sequences per step."""
        return self.step_sequences / self.steps if self.steps else 0.0

    @property
    def mean_step_tokens(self) -> float:
        return self.step_tokens / self.steps if self.steps else 0.0


ReadStats = Callable[[], Coroutine[Any, Any, EngineStats | None]]


def stats_reader(address: str, scheduler_address: str | None) -> ReadStats:
    """Returns a function that reads the counters of the scheduler at `scheduler_address`. By
    default that is the scheduler that `make up` started for `address` on this host. Without a
    scheduler, the function returns None."""
    if scheduler_address is None:
        socket = Path(".run", address.rpartition(":")[2], "scheduler.sock")
        if not socket.exists():
            return _no_stats
        scheduler_address = f"unix:{socket}"

    dialer = load_settings(ServiceSettings, []).dialer

    async def read() -> EngineStats:
        async with dialer.open(scheduler_address) as channel:
            stub = SchedulerServiceStub(channel)
            load = await stub.GetLoad(scheduler_pb2.GetLoadRequest(), timeout=_TIMEOUT_S)
        return EngineStats.of(load)

    return read


async def _no_stats() -> None:
    return None


@dataclass(frozen=True)
class Run:
    """The results of a run of the workload, measured at its clients and in the engine."""

    name: str
    traces: Sequence[Trace]
    metrics: Metrics
    stats: EngineStats | None  # None: the scheduler could not be asked

    def figures(self) -> dict[str, Any]:
        stats = self.stats
        return {
            **dataclasses.asdict(self.metrics),
            "steps": stats and stats.steps,
            "mean_batch": stats and stats.mean_batch,
            "mean_step_tokens": stats and stats.mean_step_tokens,
            "cached_prompt_tokens": stats and stats.cached_prompt_tokens,
            "preemptions": stats and stats.preemptions,
        }


@dataclass(frozen=True)
class SingleStream:
    """Medians of requests that run one at a time; None if nothing was measured."""

    single_stream_tokens_per_s: float | None  # after the first token
    ttft_1024_s: float | None


def private_stack(model: str | Path, console: Console, **options: Any) -> PrivateStack:
    """Starts a `PrivateStack` with `options`, and shows a status line meanwhile. Unless they say
    otherwise it does not speculate, because models with random weights repeat themselves."""
    with console.status(f"starting a private stack with {model}"):
        return PrivateStack(model, **{"speculation": "none", **options})


@contextmanager
def measured_server(
    options: argparse.Namespace, console: Console
) -> Iterator[tuple[str, str | None]]:
    """Yields the addresses of a frontend and its scheduler: `options.address`, or a new private
    stack with `options.model`. A scheduler's address may be unknown."""
    if options.address:
        yield options.address, None
        return
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        scheduler_address = f"unix:{directory}/scheduler.sock"
        with private_stack(options.model, console, scheduler_address=scheduler_address) as stack:
            yield stack.address, scheduler_address


async def run_stack(
    llm: AsyncLLM,
    warm_up: WorkloadRequest,
    requests: list[WorkloadRequest],
    read_stats: ReadStats,
) -> Run:
    """Runs `warm_up`, then measures `requests`.

    Raises:
        BenchError: a completion is not as long as requested.
        LLMError: the server refused or failed.
    """
    await run_request(llm, warm_up)
    before = await read_stats()
    traces = await asyncio.gather(*(run_request(llm, each) for each in requests))
    after = await read_stats()
    stats = after.since(before) if after and before else None
    return Run("stack", traces, summarize(traces), stats)


async def run_request(llm: AsyncLLM, request: WorkloadRequest, trace: Trace | None = None) -> Trace:
    """Runs one request; returns its times at the client.

    Args:
        trace: receives the times as they come.

    Raises:
        BenchError: the completion is not as long as requested.
    """
    params = replace(
        PLAIN,
        temperature=TEMPERATURE,
        max_tokens=request.output_len,
        ignore_eos=True,
        seed=request.seed,
    )
    trace = trace or Trace(len(request.prompt), sent=time.perf_counter())
    async for chunk in llm.stream(request.prompt, params):
        if chunk.token_ids:
            trace.arrivals.append((time.perf_counter(), len(chunk.token_ids)))
    if trace.output_tokens != request.output_len:
        raise BenchError(
            f"the server generated {trace.output_tokens} tokens instead of {request.output_len}; "
            "the figures would not be comparable"
        )
    return trace


async def measure_single_stream(
    llm: AsyncLLM, model: ModelInfo, repeats: int = REPEATS
) -> SingleStream:
    """Measures requests one at a time.

    Raises:
        BenchError: the long prompt does not fit the model.
        LLMError: the server refused or failed.
    """
    if model.max_model_len <= LONG_PROMPT:
        raise BenchError(
            f"--single-stream: needs {LONG_PROMPT + 1} tokens; the server allows "
            f"{model.max_model_len}"
        )
    rates, ttfts = [], []
    for _ in range(repeats):
        stream = random_request(model.vocab_size, STREAM_PROMPT, STREAM_TOKENS)
        rates.append((await run_request(llm, stream)).tokens_per_s)
        prompt = random_request(model.vocab_size, LONG_PROMPT, 1)
        ttfts.append((await run_request(llm, prompt)).ttft_s)
    return SingleStream(statistics.median(rates), statistics.median(ttfts))
