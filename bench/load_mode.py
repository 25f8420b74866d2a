"""`python -m bench --mode load`: measures latency against load, for requests that arrive at random.

Arrivals are a Poisson process. A request is sent when it is due, even if earlier requests have not
been answered. The rate rises until the server falls behind. See docs/results/cpu.md.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from bench.metrics import Trace, summarize
from bench.report import check_lengths, mode_parser, print_table
from bench.stack import measured_server, run_request
from bench.workload import Shape, WorkloadRequest, check_fits, reference_workload, warm_up_request
from nano_vllm_grpc import AsyncLLM

# A server is beyond its capacity if it takes this many times as long as the requests' arrivals.
_BEHIND = 1.5
_COLUMNS = (
    ("offered/s", "offered_rate", "{:.2f}"),
    ("achieved/s", "achieved_rate", "{:.2f}"),
    ("goodput/s", "goodput", "{:.2f}"),
    ("TTFT p50, s", "ttft_p50_s", "{:.3f}"),
    ("p99", "ttft_p99_s", "{:.3f}"),
    ("ITL p50, s", "itl_p50_s", "{:.4f}"),
    ("p99", "itl_p99_s", "{:.4f}"),
)


@dataclass(frozen=True)
class Goals:
    """The maximum times of a good request: to its first token, and on average to each further
    one."""

    ttft_s: float
    itl_s: float

    def met(self, trace: Trace) -> bool:
        latencies = trace.inter_token_latencies_s()
        mean = sum(latencies) / len(latencies) if latencies else 0.0
        return trace.ttft_s <= self.ttft_s and mean <= self.itl_s


def parse_args(args: list[str]) -> argparse.Namespace:
    parser = mode_parser("load", __doc__)
    add = parser.add_argument
    add("--address", help="address of a frontend; default: start a private stack")
    add("--rate", type=float, default=1.0, help="first rate in requests/s, %(default)s")
    add("--growth", type=float, default=1.4, help="factor from rate to rate, %(default)s")
    add("--seconds", type=float, default=60.0, help="seconds per rate, %(default)s")
    add("--ttft-goal", type=float, default=2.0, help="seconds, %(default)s")
    add("--itl-goal", type=float, default=0.2, help="seconds, %(default)s")
    add("--min-input", type=int, default=32, help="tokens, %(default)s")
    add("--max-input", type=int, default=256, help="%(default)s")
    add("--min-output", type=int, default=16, help="%(default)s")
    add("--max-output", type=int, default=128, help="%(default)s")
    add("--seed", type=int, default=0, help="%(default)s")
    options = parser.parse_args(args)
    for name in ("rate", "seconds", "ttft_goal", "itl_goal"):
        if not getattr(options, name) > 0:
            parser.error(f"--{name.replace('_', '-')}: must be over 0")
    if not options.growth > 1:
        parser.error("--growth: must be over 1")
    check_lengths(parser, options)
    return options


def measure(options: argparse.Namespace, console: Console) -> Iterator[dict[str, Any]]:
    """Yields the figures of all loads.

    Raises:
        BenchError: a completion is shorter than requested, or the requests do not fit the model.
        LLMError: the server refused or failed.
    """
    with measured_server(options, console) as (address, _):
        model, loads = asyncio.run(_measure_loads(options, address, console))
    yield {
        "model": model,
        "loads": loads,
        "goals": {"ttft_s": options.ttft_goal, "itl_s": options.itl_goal},
        "seconds": options.seconds,
        "workload": dataclasses.asdict(_shape(options, 0, 0)),
    }
    title = f"{model}: latency against load"
    rows = ([pattern.format(load[name]) for _, name, pattern in _COLUMNS] for load in loads)
    print_table(console, title, [label for label, _, _ in _COLUMNS], rows)


async def _measure_loads(
    options: argparse.Namespace, address: str, console: Console
) -> tuple[str, list[dict[str, Any]]]:
    """Raises the rate until the server is beyond its capacity -> the model's name, all loads."""
    goals = Goals(options.ttft_goal, options.itl_goal)
    loads: list[dict[str, Any]] = []
    async with AsyncLLM(address) as llm:
        model = await llm.get_model()
        rate, behind = options.rate, False
        while not behind:
            due = arrivals(rate, options.seconds, options.seed + len(loads))
            shape = _shape(options, len(due), len(loads))
            requests = reference_workload(shape, model.vocab_size)
            check_fits(requests, model.max_model_len)
            await run_request(llm, warm_up_request(shape, model.vocab_size))
            with console.status(f"{rate:.2f} requests/s, {len(due)} requests"):
                traces = await _send(llm, due, requests)
            loads.append(summarize_load(traces, options.seconds, goals))
            behind = loads[-1]["duration_s"] > _BEHIND * options.seconds
            rate *= options.growth
    return model.model, loads


def arrivals(rate: float, seconds: float, seed: int) -> list[float]:
    """The times of a Poisson process's events, from 0 on; at least one time."""
    rng = random.Random(f"arrivals {seed}")
    times = [0.0]
    while (following := times[-1] + rng.expovariate(rate)) < seconds:
        times.append(following)
    return times


def summarize_load(traces: list[Trace], seconds: float, goals: Goals) -> dict[str, Any]:
    """Computes the figures of requests that arrived within `seconds`. Rates are requests per
    second: the offered one over the time of the arrivals, the achieved one over the time until the
    last token, and the goodput of those that met both goals."""
    metrics = summarize(traces)
    taken = max(metrics.duration_s, seconds)
    return {
        "offered_rate": len(traces) / seconds,
        "achieved_rate": len(traces) / taken,
        "goodput": sum(goals.met(trace) for trace in traces) / taken,
        **dataclasses.asdict(metrics),
    }


async def _send(llm: AsyncLLM, due: list[float], requests: list[WorkloadRequest]) -> list[Trace]:
    """Sends each request when it is due, and waits for all."""
    start = time.perf_counter()

    async def send(when: float, request: WorkloadRequest) -> Trace:
        await asyncio.sleep(start + when - time.perf_counter())
        trace = await run_request(llm, request)
        trace.sent = start + when  # so a delay in a busy client counts, too
        return trace

    return await asyncio.gather(*map(send, due, requests))


def _shape(options: argparse.Namespace, count: int, number: int) -> Shape:
    """The workload's shape. Each rate has other prompts, so that the prefix cache has none."""
    return Shape(
        count,
        options.min_input,
        options.max_input,
        options.min_output,
        options.max_output,
        options.seed + number,
    )
