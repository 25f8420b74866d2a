"""Measures what metrics cost a step: `python -m bench.metrics_cost [--num-seqs N ...]`.

An engine decodes with workers that answer at once and no gRPC, so that a step is as short as can
be. Runs of steps with and without metrics take turns; the differences' median counts. Do it on an
otherwise idle machine.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
import timeit
from collections import deque
from collections.abc import Callable
from functools import partial

from prometheus_client import CollectorRegistry, generate_latest
from rich.console import Console
from rich.table import Table

from frontend.metrics import RequestMetrics
from scheduler_svc.core.admission import Limits
from scheduler_svc.core.block_manager import BlockManager
from scheduler_svc.core.sampling import SamplingParams
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.step import Answer, Output, Step, StepTiming
from scheduler_svc.engine import Engine
from scheduler_svc.metrics import EngineMetrics
from shared.telemetry.metrics import ServiceMetrics

_BLOCK_SIZE = 64
_STEPS = 4 * _BLOCK_SIZE  # measured together: each time as many begin a block of the cache
_PROMPT = 100  # tokens


class InstantWorkers:
    """Answer every step at once."""

    def __init__(self) -> None:
        self._sent: deque[Step] = deque()

    async def send(self, step: Step) -> None:
        self._sent.append(step)

    async def receive(self) -> Answer:
        return Answer([7] * len(self._sent.popleft().rows))

    async def watch(self) -> str:
        never: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        return await never

    async def recover(self) -> None:
        raise AssertionError("they are never lost")


class SwitchedMetrics(EngineMetrics):
    """Metrics that can be turned off, which costs a call more when they are on."""

    on = True

    def step_answered(self, step: Step, timing: StepTiming) -> None:
        if self.on:
            super().step_answered(step, timing)


async def measure_steps(num_seqs: int, rounds: int) -> list[tuple[float, float]]:
    """CPU seconds per step without metrics, and how many more with them: a pair per round."""
    max_len = _PROMPT + _STEPS * (4 * rounds + 8)
    num_blocks = num_seqs * (max_len // _BLOCK_SIZE + 1)
    limits = Limits(num_seqs, max(2048, 2 * num_seqs), max_len, num_seqs, vocab_size=100)
    scheduler = Scheduler(limits, BlockManager(num_blocks, _BLOCK_SIZE))
    metrics = SwitchedMetrics()
    times = list[float]()
    done, count, began = asyncio.Event(), 0, 0.0

    def emit(_: list[Output]) -> None:
        nonlocal count, began
        count += scheduler.num_running == num_seqs
        if count and count % _STEPS == 0:
            times.append((time.thread_time() - began) / _STEPS)
            metrics.on = len(times) % 4 in (0, 3)  # so that a drift cancels out
            if len(times) == 4 * (rounds + 1):
                done.set()
            began = time.thread_time()

    engine = Engine(scheduler, InstantWorkers(), emit, metrics=metrics)
    for number in range(num_seqs):
        params = SamplingParams(max_len - _PROMPT, seed=number)
        engine.submit(Sequence((0, number), range(_PROMPT), params))
    running = asyncio.create_task(engine.run())
    await done.wait()
    running.cancel()
    found = []
    for i in range(4, len(times), 4):  # the first were not only decodes
        on, off = times[i] + times[i + 3], times[i + 1] + times[i + 2]
        found.append((off / 2, (on - off) / 2))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.metrics_cost", description=__doc__)
    parser.add_argument("--num-seqs", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--rounds", type=int, default=30, help="of four runs, %(default)s")
    options = parser.parse_args()
    table = Table("sequences", "step, µs", "of it metrics, µs (quartiles)", "share")
    for num_seqs in options.num_seqs:
        steps, costs = zip(*asyncio.run(measure_steps(num_seqs, options.rounds)), strict=True)
        low, cost, high = (1e6 * each for each in statistics.quantiles(costs))
        step_us = 1e6 * statistics.median(steps)
        spread = f"{cost:.2f} ({low:.2f} to {high:.2f})"
        table.add_row(str(num_seqs), f"{step_us:.1f}", spread, f"{cost / step_us:.2%}")
    console = Console()
    console.print(table)
    engine, requests = EngineMetrics(), RequestMetrics()
    step, timing = Step(1, []), StepTiming(0.005, 0.0, 0.0)
    parts: dict[str, Callable[[], object]] = {
        "a step in the scheduler": lambda: engine.step_answered(step, timing),
        "a token in the frontend": lambda: requests.inter_token_latency.observe(0.03),
        "a scrape of the scheduler": partial(generate_latest, _registry(engine)),
        "a scrape of a frontend": partial(generate_latest, _registry(requests)),
    }
    for name, part in parts.items():
        console.print(
            f"{name}: {1e6 * min(timeit.repeat(part, number=100, repeat=100)) / 100:.2f} µs"
        )


def _registry(metrics: ServiceMetrics) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(metrics)
    return registry


if __name__ == "__main__":
    main()
