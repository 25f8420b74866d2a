"""Runs requests through the public gRPC API, as the whole workload at once or one at a time."""

from __future__ import annotations

import asyncio
import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.engine_stats import EngineStats, ReadStats
from bench.errors import BenchError
from bench.metrics import Metrics, Trace, summarize
from bench.workload import (
    LONG_PROMPT,
    REPEATS,
    STREAM_PROMPT,
    STREAM_TOKENS,
    TEMPERATURE,
    Request,
    random_request,
)
from nano_vllm_grpc import AsyncLLM, ModelInfo, PrivateStack, SamplingParams

# Parameters without effect, which replace a model's own defaults. Only the temperature remains.
PLAIN = SamplingParams(top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0)
Received = Callable[[int], object]


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


async def run_stack(
    llm: AsyncLLM,
    warm_up: Request,
    requests: list[Request],
    read_stats: ReadStats,
    received: Received,
) -> Run:
    """Runs `warm_up`, then measures `requests`; calls `received` with each chunk's token count.

    Raises:
        BenchError: a completion is not as long as requested.
        LLMError: the server refused or failed.
    """
    await run_request(llm, warm_up)
    before = await read_stats()
    traces = await asyncio.gather(*(run_request(llm, each, received) for each in requests))
    after = await read_stats()
    stats = after.since(before) if after and before else None
    return Run("stack", traces, summarize(traces), stats)


async def run_request(
    llm: AsyncLLM,
    request: Request,
    received: Received = lambda tokens: None,
    fields: Mapping[str, Any] | None = None,
) -> Trace:
    """Runs one request; returns its times at the client.

    Args:
        fields: sampling parameters that replace the workload's.

    Raises:
        BenchError: the completion ignores ends and is not as long as requested.
    """
    workload = {
        "temperature": TEMPERATURE,
        "max_tokens": request.output_len,
        "ignore_eos": True,
        "seed": request.seed,
    }
    params = replace(PLAIN, **{**workload, **(fields or {})})
    trace = Trace(len(request.prompt), sent=time.perf_counter())
    async for chunk in llm.stream(request.prompt, params):
        if chunk.token_ids:
            trace.arrivals.append((time.perf_counter(), len(chunk.token_ids)))
            received(len(chunk.token_ids))
    if params.ignore_eos and trace.output_tokens != request.output_len:
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
