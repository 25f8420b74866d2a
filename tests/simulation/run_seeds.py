"""Runs many seeds on several processes."""

from __future__ import annotations

import logging
import multiprocessing
import signal
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from types import FrameType

import structlog
from tqdm import tqdm

from tests.simulation.cluster.simulate import simulate as simulate_cluster
from tests.simulation.simulate import Result, SimulationError, simulate

WORLDS: dict[str, Callable[[int], Result]] = {"engine": simulate, "cluster": simulate_cluster}
_MAX_CPU_SECONDS = 5  # per seed, which takes a tenth of one: beyond that it is an endless loop
_CHUNK = 20


@dataclass
class Summary:
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)  # in order of the seeds


def run_seeds(
    seeds: range, processes: int, progress: bool = False, world: str = "engine"
) -> Summary:
    """Runs all seeds of one of `WORLDS`, even after one has failed."""
    summary = Summary()
    # Not forked: the scheduler's step encoder imports gRPC, which is not fork-safe.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, _quiet) as pool:
        results = pool.map(partial(_run, world), seeds, chunksize=_CHUNK)
        for counts in tqdm(results, total=len(seeds), disable=not progress, unit="seed"):
            if isinstance(counts, str):
                summary.failures.append(counts)
            else:
                summary.counts.update(counts)
    return summary


def _quiet() -> None:
    """Keeps lost workers, which simulations are all about, out of the log."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    signal.signal(signal.SIGPROF, _too_long)


def _run(world: str, seed: int) -> Counter[str] | str:
    signal.setitimer(signal.ITIMER_PROF, _MAX_CPU_SECONDS)
    try:
        return WORLDS[world](seed).counts
    except SimulationError as error:
        return str(error)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _too_long(signum: int, frame: FrameType | None) -> None:
    raise TimeoutError("an endless loop")
