"""`python -m bench --mode features`: the cost of each sampling feature, to streams that use it and
to those that run beside them.

All streams of a run use one feature; each such run is paired with a plain one before it, and a
figure is the median over the pairs. Then half of the streams are plain and half are not: the gaps
between tokens of the plain ones show what their neighbours cost them. See docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.errors import BenchError
from bench.machine import this_machine
from bench.metrics import Metrics, Trace, percentile, summarize
from bench.stack import PLAIN, private_stack
from nano_vllm_grpc import AsyncLLM, LLMError, StructuredOutput

# Matches long enough text for any run, so that no stream ends early.
_WORDS = StructuredOutput(regex=r"([a-z]{1,9}[ .])+")
FEATURES: dict[str, dict[str, Any]] = {
    "top_k 20, top_p 0.95": {"top_k": 20, "top_p": 0.95},
    "min_p 0.05": {"min_p": 0.05},
    "penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.5},
    "logit_bias": {"logit_bias": {7: 1.0}},
    "logprobs 5": {"logprobs": 5},
    "regex": {"structured_output": _WORDS},
}


@dataclass(frozen=True)
class Cost:
    """Medians over the pairs; ratios are to the pair's plain run."""

    feature: str
    tokens_per_s: float
    speed: float  # of tokens/s
    neighbours_gap_p50: float  # gaps between plain streams' tokens, to those beside plain ones
    neighbours_gap_p99: float


def parse_args(args: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench --mode features", description=__doc__)
    parser.add_argument("--model", default="models/demo", help="%(default)s")
    parser.add_argument("--streams", type=int, default=32, help="%(default)s")
    parser.add_argument("--tokens", type=int, default=96, help="per stream, %(default)s")
    parser.add_argument("--pairs", type=int, default=3, help="%(default)s")
    parser.add_argument("--out", type=Path, default=Path("bench.json"), help="%(default)s")
    options = parser.parse_args(args)
    for name in ("tokens", "pairs"):
        if getattr(options, name) <= 0:
            parser.error(f"--{name}: must be over 0")
    if options.streams < 2:
        parser.error("--streams: must be at least 2")
    return options


async def measure(options: argparse.Namespace, console: Console) -> list[Cost]:
    """
    Raises:
        BenchError: a completion is shorter than requested.
        LLMError: the server refused or failed.
    """
    costs = []
    with private_stack(options.model, console) as stack:
        async with AsyncLLM(stack.address) as llm:
            for name, fields in FEATURES.items():
                with console.status(name):
                    await _run(llm, options, {}, fields)  # warms up: grammars are compiled
                    pairs = [await _pair(llm, options, fields) for _ in range(options.pairs)]
                costs.append(Cost(name, *(statistics.median(v) for v in zip(*pairs, strict=True))))
    return costs


async def _pair(
    llm: AsyncLLM, options: argparse.Namespace, fields: dict[str, Any]
) -> tuple[float, float, float, float]:
    """Measures `Cost`'s figures in a plain run, one with the feature and one with both kinds."""
    plain, plain_gaps = await _run(llm, options, {}, {})
    used, _ = await _run(llm, options, fields, fields)
    _, gaps = await _run(llm, options, {}, fields)
    p50, p99 = ((percentile(gaps, q) or 0.0) / (percentile(plain_gaps, q) or 1.0) for q in (50, 99))
    speed = used.output_tokens_per_s / plain.output_tokens_per_s
    return used.output_tokens_per_s, speed, p50, p99


async def _run(
    llm: AsyncLLM, options: argparse.Namespace, ours: dict[str, Any], theirs: dict[str, Any]
) -> tuple[Metrics, list[float]]:
    """Runs half of the streams with `ours`, half with `theirs` -> all metrics, our half's gaps."""
    half = options.streams // 2
    traces = await asyncio.gather(
        *(_stream(llm, i, options.tokens, ours if i < half else theirs) for i in range(2 * half))
    )
    gaps = [gap for trace in traces[:half] for gap in trace.inter_token_latencies_s()]
    return summarize(traces), gaps


async def _stream(llm: AsyncLLM, number: int, tokens: int, fields: dict[str, Any]) -> Trace:
    params = dataclasses.replace(
        PLAIN,
        temperature=1.0,
        seed=number,
        max_tokens=tokens,
        ignore_eos="structured_output" not in fields,
        **fields,
    )
    prompt = [3 + number] * 8
    trace = Trace(len(prompt), sent=time.perf_counter())
    async for chunk in llm.stream(prompt, params):
        if chunk.token_ids:
            trace.arrivals.append((time.perf_counter(), len(chunk.token_ids)))
    if "structured_output" not in fields and trace.output_tokens != tokens:
        raise BenchError(f"{trace.output_tokens} tokens came where {tokens} were asked for")
    return trace


def print_table(costs: list[Cost], options: argparse.Namespace, console: Console) -> None:
    table = Table(title=f"{options.streams} streams of {options.tokens} tokens")
    for column in ("", "tokens/s", "to plain", "neighbours' gaps p50", "p99"):
        table.add_column(column, justify="left" if not column else "right")
    for cost in costs:
        table.add_row(
            cost.feature,
            f"{cost.tokens_per_s:,.0f}",
            f"{cost.speed:.2f}",
            f"{cost.neighbours_gap_p50:.2f}",
            f"{cost.neighbours_gap_p99:.2f}",
        )
    console.print(table)


def main(args: list[str]) -> int:
    options = parse_args(args)
    console = Console()
    try:
        costs = asyncio.run(measure(options, console))
    except (BenchError, LLMError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    print_table(costs, options, console)
    found = {
        "mode": "features",
        "model": options.model,
        "streams": options.streams,
        "tokens": options.tokens,
        "pairs": options.pairs,
        "costs": [dataclasses.asdict(cost) for cost in costs],
        **dataclasses.asdict(this_machine()),
    }
    options.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    console.print(f"written: {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
