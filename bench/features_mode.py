"""`python -m bench --mode features`: measures the cost of each sampling feature, to streams that
use it and to streams that run beside them.

All streams of a run use one feature. Each such run is paired with a plain run before it, and a
figure is the median over the pairs. In a third run, half of the streams are plain. The gaps between
their tokens show the cost of their neighbours' feature. See docs/results/cpu.md.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import statistics
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from bench.metrics import Metrics, percentile, summarize
from bench.report import check_minimum, mode_parser, print_table
from bench.stack import private_stack, run_request
from bench.workload import Request
from nano_vllm_grpc import AsyncLLM, StructuredOutput

# Matches texts of any length, so that no stream ends early.
_WORDS = StructuredOutput(regex=r"([a-z]{1,9}[ .])+")
FEATURES: dict[str, dict[str, Any]] = {
    "top_k 20, top_p 0.95": {"top_k": 20, "top_p": 0.95},
    "min_p 0.05": {"min_p": 0.05},
    "penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.5},
    "logit_bias": {"logit_bias": {7: 1.0}},
    "logprobs 5": {"logprobs": 5},
    "regex": {"structured_output": _WORDS, "ignore_eos": False},
}


@dataclass(frozen=True)
class Cost:
    """Medians over the pairs; ratios compare with the pair's plain run."""

    feature: str
    tokens_per_s: float
    speed: float  # ratio of tokens/s
    neighbours_gap_p50: float  # ratio of the gaps between a plain stream's tokens
    neighbours_gap_p99: float


def parse_args(args: list[str]) -> argparse.Namespace:
    parser = mode_parser("features", __doc__)
    parser.add_argument("--model", default="models/demo", help="%(default)s")
    parser.add_argument("--streams", type=int, default=32, help="%(default)s")
    parser.add_argument("--tokens", type=int, default=96, help="tokens per stream, %(default)s")
    parser.add_argument("--pairs", type=int, default=3, help="%(default)s")
    options = parser.parse_args(args)
    check_minimum(parser, options, 1, ["tokens", "pairs"])
    check_minimum(parser, options, 2, ["streams"])
    return options


def measure(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Measures all features; returns the figures for the JSON.

    Raises:
        BenchError: a completion is shorter than requested.
        LLMError: the server refused or failed.
    """
    with private_stack(options.model, console) as stack:
        costs = asyncio.run(_measure_costs(options, stack.address, console))
    title = f"{options.streams} streams of {options.tokens} tokens"
    columns = ("", "tokens/s", "to plain", "neighbours' gaps p50", "p99")
    rows = (
        (
            cost.feature,
            f"{cost.tokens_per_s:,.0f}",
            f"{cost.speed:.2f}",
            f"{cost.neighbours_gap_p50:.2f}",
            f"{cost.neighbours_gap_p99:.2f}",
        )
        for cost in costs
    )
    print_table(console, title, columns, rows)
    return {
        "model": options.model,
        "streams": options.streams,
        "tokens": options.tokens,
        "pairs": options.pairs,
        "costs": [dataclasses.asdict(cost) for cost in costs],
    }


async def _measure_costs(options: argparse.Namespace, address: str, console: Console) -> list[Cost]:
    costs = []
    async with AsyncLLM(address) as llm:
        for name, fields in FEATURES.items():
            with console.status(name):
                await _run(llm, options, {}, fields)  # warms up: grammars are compiled
                pairs = [await _pair(llm, options, fields) for _ in range(options.pairs)]
            costs.append(Cost(name, *(statistics.median(v) for v in zip(*pairs, strict=True))))
    return costs


async def _pair(
    llm: AsyncLLM, options: argparse.Namespace, fields: dict[str, Any]
) -> tuple[float, float, float, float]:
    """Measures `Cost`'s figures in three runs: plain, with the feature, and half of each."""
    plain, plain_gaps = await _run(llm, options, {}, {})
    used, _ = await _run(llm, options, fields, fields)
    _, gaps = await _run(llm, options, {}, fields)
    p50, p99 = ((percentile(gaps, q) or 0.0) / (percentile(plain_gaps, q) or 1.0) for q in (50, 99))
    speed = used.output_tokens_per_s / plain.output_tokens_per_s
    return used.output_tokens_per_s, speed, p50, p99


async def _run(
    llm: AsyncLLM, options: argparse.Namespace, ours: dict[str, Any], theirs: dict[str, Any]
) -> tuple[Metrics, list[float]]:
    """Runs half of the streams with `ours` and half with `theirs` -> the metrics of all streams and
    the gaps of the first half."""
    half = options.streams // 2
    requests = [Request([3 + i] * 8, options.tokens, seed=i) for i in range(2 * half)]
    traces = await asyncio.gather(
        *(
            run_request(llm, request, fields=ours if number < half else theirs)
            for number, request in enumerate(requests)
        )
    )
    gaps = [gap for trace in traces[:half] for gap in trace.inter_token_latencies_s()]
    return summarize(traces), gaps
