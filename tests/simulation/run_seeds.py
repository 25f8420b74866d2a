"""Runs many seeds of a simulated world."""

from __future__ import annotations

import logging
import multiprocessing
import signal
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import FrameType

import structlog
from tqdm import tqdm

from tests.simulation import deadly_requests, prefix_index, state_machines
from tests.simulation.cluster.simulate import simulate as simulate_cluster
from tests.simulation.simulate import SimulationError, simulate

# Each runs a seed, counts what it reached, and raises if something is wrong.
WORLDS: dict[str, Callable[[int], Counter[str]]] = {
    "engine": lambda seed: simulate(seed).counts,
    "cluster": lambda seed: simulate_cluster(seed).counts,
    "successions": deadly_requests.simulate,
    "prefix-index": prefix_index.simulate,
    "state-machines": state_machines.simulate,
}
_MAX_CPU_SECONDS = 30  # per seed, which takes a second at most: beyond that it is an endless loop
_CHUNK = 20


@dataclass
class Summary:
    num_seeds: int = 0  # that were run
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)  # in order of the seeds


def run_seeds(
    world: str,
    seeds: range,
    processes: int = 1,
    *,
    to_first_failure: bool = False,
    progress: bool = False,
) -> Summary:
    """Runs all seeds of one of `WORLDS`, on `processes` processes, or in this one if it is one."""
    summary = Summary()
    with _results(partial(_run, world), seeds, processes) as results:
        for counts in tqdm(results, total=len(seeds), disable=not progress, unit="seed"):
            summary.num_seeds += 1
            if isinstance(counts, str):
                summary.failures.append(counts)
                if to_first_failure:
                    break
            else:
                summary.counts.update(counts)
    return summary


@contextmanager
def _results(
    run: Callable[[int], Counter[str] | str], seeds: range, processes: int
) -> Iterator[Iterable[Counter[str] | str]]:
    if processes == 1:
        yield map(run, seeds)
        return
    # Not forked: the scheduler's step encoder imports gRPC, which is not fork-safe.
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        yield pool.map(run, seeds, chunksize=_CHUNK)
        pool.shutdown(cancel_futures=True)


def _run(world: str, seed: int) -> Counter[str] | str:
    """Runs a seed; returns what it reached, or what is wrong and how to see it again."""
    try:
        with _quiet(), _limited():
            return WORLDS[world](seed)
    except SimulationError as error:
        problem = str(error)
    except Exception:
        problem = traceback.format_exc()
    replay = f"python -m tests.simulation --of {world} --seeds 1 --seed {seed}"
    return f"{world}: seed {seed} fails\n{problem}\nreplay: {replay}"


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps lost workers, which simulations are all about, out of the log."""
    usual = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    try:
        yield
    finally:
        structlog.configure(**usual)


@contextmanager
def _limited() -> Iterator[None]:
    usual = signal.signal(signal.SIGPROF, _too_long)
    signal.setitimer(signal.ITIMER_PROF, _MAX_CPU_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, usual)


def _too_long(signum: int, frame: FrameType | None) -> None:
    raise TimeoutError("an endless loop")
