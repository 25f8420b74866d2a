"""`python -m bench --mode steps`: measures a worker's steps on a CPU, in this process.

The steps are decodes, prompts and both together. The worker reads its settings from NANO_<NAME>.
`--parts` also shows the time of each part of a step, summed over all layers, and how long the
thread that computes it then waits for other threads. Run it on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections import defaultdict
from collections.abc import Iterator
from ctypes import addressof
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from rich.console import Console

from bench.gpu.steps import make_step
from bench.report import mode_parser
from deploy.model import resolve_model
from shared.config import load_settings
from worker_svc.kept_memory.memory import KeptMemory
from worker_svc.kernels.cpu import traced_model
from worker_svc.kernels.cpu.program import run_timed
from worker_svc.kernels.cpu.structs import Phase, ProductArgs
from worker_svc.kernels.cpu.weights import PanelWeight
from worker_svc.layers.embedding import VocabParallelHead
from worker_svc.layers.linear import ColumnParallelLinear, RowParallelLinear
from worker_svc.model_runner import ModelRunner
from worker_svc.sampling.sampler import Sampler
from worker_svc.settings import WorkerSettings

CONTEXT = 280
# The number of decoding sequences at `CONTEXT`, and the length of a new prompt beside them.
STEPS = ((1, 0), (8, 0), (32, 0), (256, 0), (0, 128), (0, 1024), (31, 128), (8, 512))
_WITH_PRODUCTS = "worker_svc.models.", "worker_svc.layers.experts"  # modules
_MIN_S, _MIN_RUNS = 1.0, 3
_NUMBERS = 0x3C  # in all bytes, they are about 0.01 in float32 and bfloat16


@dataclass
class PartTimes:
    """Seconds of the thread that calls the kernels."""

    work: float = 0.0
    waits: float = 0.0  # for other threads, after its own work


Parts = dict[str, PartTimes]


def time_parts(runner: ModelRunner) -> Parts:
    """Returns a dictionary to which each part of a step adds its times. The products of a layer
    have the names of their attributes."""
    parts: Parts = defaultdict(PartTimes)
    products = dict(_products(runner._model.decoder))

    def run_and_time(ops: Any, step: Any) -> None:
        for op, times in zip(ops, run_timed(ops, step), strict=True):
            part = Phase(op.phase).name.lower()
            if op.phase == Phase.PRODUCT:
                part = products[ProductArgs.from_address(op.args).weight]
            parts[part].work += times.work
            parts[part].waits += times.wait

    def wrap(owner: Any, method: str, part: str) -> None:
        function = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            result = function(*args, **kwargs)
            parts[part].work += time.perf_counter() - started
            return result

        setattr(owner, method, timed)

    module: Any = traced_model
    module.run = run_and_time
    wrap(traced_model.Program, "_run_host_call", "between native calls")
    wrap(VocabParallelHead, "__call__", "head")
    wrap(Sampler, "__call__", "sampler")
    return parts


def _products(owner: object) -> Iterator[tuple[int, str]]:
    """Yields the address of the library's weight, and the attribute's name, of each matrix in a
    part of the model."""
    for name, value in vars(owner).items():
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, ColumnParallelLinear | RowParallelLinear):
                if isinstance(each._weight, PanelWeight):
                    yield addressof(each._weight.struct(each._bias, each._weight.segment)), name
            elif isinstance(each, PanelWeight):
                yield addressof(each.struct(None, each.segment)), name.strip("_")
            elif type(each).__module__.startswith(_WITH_PRODUCTS):
                yield from _products(each)


def time_step(runner: ModelRunner, decodes: int, prompt: int, parts: Parts) -> float:
    """The median seconds of a step, from runs that together take at least a second. Leaves the mean
    times of its parts in `parts`."""
    prompts = [prompt] if prompt else []
    info = runner.info
    step = make_step(
        [1] * decodes + prompts,
        [CONTEXT] * decodes + prompts,
        info.paging.block_size,
        info.vocab_size,
    )
    runner.run(step)
    parts.clear()
    runs: list[float] = []
    while sum(runs) < _MIN_S or len(runs) < _MIN_RUNS:
        started = time.perf_counter()
        runner.run(step)
        runs.append(time.perf_counter() - started)
    for part in parts.values():
        part.work /= len(runs)
        part.waits /= len(runs)
    return median(runs)


def parse_args(args: list[str]) -> argparse.Namespace:
    parser = mode_parser("steps", __doc__)
    parser.add_argument("--parts", action="store_true", help="also show the time of each part")
    return parser.parse_args(args)


def measure(options: argparse.Namespace, console: Console) -> Iterator[dict[str, Any]]:
    """Yields the seconds of the steps so far, and of their parts.

    Raises:
        LaunchError, SettingsError, StartError: the model or a setting cannot be used.
    """
    flags = ["--device", "cpu", "--max-num-seqs", "256", "--model"]
    settings = load_settings(WorkerSettings, [*flags, str(resolve_model(options.model))])
    runner = ModelRunner(settings, memory=KeptMemory())
    blocks = max(seqs * -(-CONTEXT // runner.info.paging.block_size) for seqs, _ in STEPS)
    runner.configure(1, blocks + 1024)
    # Pages that were never written would all be one page of zeros.
    for cache in runner._model.caches:
        cache.view(torch.uint8).fill_(_NUMBERS)
    parts: Parts = time_parts(runner) if options.parts else {}
    seconds, parts_of = {}, {}
    for decodes, prompt in STEPS:
        rows = [f"{decodes} decodes"] * (decodes > 0) + [f"{prompt} tokens"] * (prompt > 0)
        name = " and ".join(rows)
        seconds[name] = time_step(runner, decodes, prompt, parts)
        console.print(f"{name:<32}{1e3 * seconds[name]:10.2f} ms")
        parts_of[name] = {part: dataclasses.asdict(times) for part, times in parts.items()}
        for part, times in sorted(parts.items(), key=lambda each: -each[1].work):
            waits = f" + {1e3 * times.waits:.2f} ms of waits" if times.waits else ""
            console.print(f"  {part:<30}{1e3 * times.work:10.2f} ms{waits}")
        yield {"model": options.model, "seconds": seconds, "parts": parts_of}
