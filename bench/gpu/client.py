"""`python -m bench.gpu.client JSON`: the reference workload's client, in a process of its own.

It prints a line of JSON for each round, and one for the lone streams, with the CPU time that each
service used meanwhile. The services are descendants of the process that started this one.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import psutil

from bench.engine_stats import stats_reader
from bench.gpu.peer import round_of
from bench.single_stream import measure_single_stream
from bench.stack import run_stack
from bench.workload import Shape, reference_workload, warm_up_request
from frontend.client import AsyncLLM

SERVICES = ("frontend", "scheduler_svc", "worker_svc")


@dataclass(frozen=True)
class Orders:
    address: str
    scheduler_address: str
    shape: dict[str, int]  # `Shape`
    rounds: int
    stream_repeats: int


async def run(orders: Orders, tell: Callable[[dict[str, Any]], None]) -> None:
    shape = Shape(**orders.shape)
    async with AsyncLLM(orders.address) as llm:
        model = await llm.get_model()
        warm_up = warm_up_request(shape, model.vocab_size)
        requests = reference_workload(shape, model.vocab_size)
        for number in range(orders.rounds):
            before = cpu_seconds()
            run = await run_stack(
                llm,
                warm_up,
                round_of(requests, number, model.vocab_size),
                stats_reader(orders.address, orders.scheduler_address),
                lambda tokens: None,
            )
            stats = asdict(run.stats) if run.stats else {}
            found = {"round": number, **asdict(run.metrics), **stats}
            tell(found | {"cpu_s": cpu_since(before)})
        before = cpu_seconds()
        single = await measure_single_stream(llm, model, orders.stream_repeats)
        tell(asdict(single) | {"cpu_s": cpu_since(before)})


def cpu_seconds() -> dict[str, float]:
    """The CPU time used so far by each service and by this process."""
    times = os.times()
    found = defaultdict(float, client=times.user + times.system)
    for process in psutil.Process(os.getppid()).children(recursive=True):
        try:
            command, used = process.cmdline(), process.cpu_times()
        except psutil.Error:  # it has just ended
            continue
        for service in SERVICES:
            if service in command:
                found[service] += used.user + used.system
    return found


def cpu_since(before: dict[str, float]) -> dict[str, float]:
    return {name: used - before.get(name, 0.0) for name, used in cpu_seconds().items()}


if __name__ == "__main__":
    asyncio.run(
        run(Orders(**json.loads(sys.argv[1])), lambda found: print(json.dumps(found), flush=True))
    )
