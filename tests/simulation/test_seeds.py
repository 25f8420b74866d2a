"""Some seeds of each simulated world; `python -m tests.simulation` runs random ones."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from scheduler_svc.core.sequence import FinishCause
from tests.simulation import virtual_time
from tests.simulation.cluster.faults import KINDS
from tests.simulation.cluster.long_run import LongRun
from tests.simulation.cluster.simulate import simulate as simulate_cluster
from tests.simulation.deadly_requests import SCENES
from tests.simulation.run_seeds import run_seeds
from tests.simulation.simulate import simulate

# The seeds, and what they must reach among other things.
SEEDS: dict[str, tuple[range, list[str]]] = {
    "engine": (
        range(150),
        [
            *(f"ended {cause.name}" for cause in FinishCause),
            "accepted drafts",
            "cached prompt tokens",
            "caches that some ranks lost",
            "copies",
            "copies made again",
            "disconnects",
            "drafted tokens",
            "full pipelines",
            "kept caches",
            "logprobs",
            "losses",
            "poisonings",
            "preemptions",
            "prompt logprobs",
            "resumed",
            "rows mid-prompt",
            "siblings",
            "tokens changed by the batch",
            "tokens not known yet",
        ],
    ),
    "cluster": (
        range(100),
        [
            *KINDS,
            "DeadlineError",
            "FailedPreconditionError",
            "InternalError",
            "QueueFullError",
            "blocks without the one before them",
            "cached prompt tokens",
            "moves with tokens",
            "poisonings",
            "refusals",
        ],
    ),
    "successions": (range(20), [scene for scene in SCENES if scene != "killed by nothing"]),
    "prefix-index": (range(50), ["messages", "parts of snapshots"]),
}


@pytest.mark.parametrize("world", SEEDS)
def test_no_seed_fails(world: str) -> None:
    seeds, reached = SEEDS[world]
    summary = run_seeds(world, seeds)
    assert not summary.failures, summary.failures[0]
    assert not [name for name in reached if not summary.counts[name]]


def test_no_request_ends_because_its_scheduler_was_killed_while_it_stopped() -> None:
    """Of four schedulers that died with a harmless request, one had said that it stops."""
    assert not simulate_cluster(7700306).counts["InternalError"]


@pytest.mark.parametrize("seed", [3, 14])
def test_a_seed_gives_the_same_steps_again(seed: int) -> None:
    first, second = simulate(seed), simulate(seed)
    assert first.counts["steps"] > 0
    assert first == second


@pytest.mark.parametrize("seed", [0, 1])
def test_a_seed_of_a_cluster_gives_the_same_tokens_at_the_same_times(seed: int) -> None:
    assert simulate_cluster(seed) == simulate_cluster(seed)


def test_a_cluster_under_load_is_balanced_and_finds_most_prefixes(tmp_path: Path) -> None:
    run = LongRun(Random(1), tmp_path, engines=8, frontends=2, requests_per_s=2000, seconds=1.0)
    figures = virtual_time.run(run.run())
    assert figures["moves with tokens"]
    assert figures["hit rate"] > 0.75 * figures["hit rate of one endless cache"]
    assert figures["imbalance: most/mean sequences, p100"] < 2
