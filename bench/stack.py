"""Runs the workload through the public gRPC API, all requests at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.engine_stats import ReadStats
from bench.errors import BenchError
from bench.metrics import Trace, summarize
from bench.run import Run
from bench.workload import TEMPERATURE, Request
from nano_vllm_grpc import AsyncLLM, PrivateStack, SamplingParams

# Adds nothing to a temperature, whatever the model's own defaults are.
PLAIN = SamplingParams(top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0)
Received = Callable[[int], None]


def private_stack(model: str | Path, console: Console, **options: Any) -> PrivateStack:
    """Starts a stack, with `options` of `PrivateStack`, and says so while it does."""
    with console.status(f"starting a private stack with {model}"):
        return PrivateStack(model, **options)


async def run_stack(
    llm: AsyncLLM,
    warm_up: Request,
    requests: list[Request],
    read_stats: ReadStats,
    received: Received,
) -> Run:
    """Runs `warm_up`, then measures `requests`; `received` is told each chunk's number of tokens.

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
    llm: AsyncLLM, request: Request, received: Received = lambda tokens: None
) -> Trace:
    """Runs one request, timed at the client."""
    params = replace(
        PLAIN,
        temperature=TEMPERATURE,
        max_tokens=request.output_len,
        ignore_eos=True,
        seed=request.seed,
    )
    trace = Trace(len(request.prompt), sent=time.perf_counter())
    async for chunk in llm.stream(request.prompt, params):
        if chunk.token_ids:
            trace.arrivals.append((time.perf_counter(), len(chunk.token_ids)))
            received(len(chunk.token_ids))
    if trace.output_tokens != request.output_len:
        raise BenchError(
            f"the server made {trace.output_tokens} tokens where {request.output_len} were asked "
            "for: the figures would not be comparable"
        )
    return trace
