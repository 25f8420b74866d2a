"""Runs of the simulated cluster; `python -m tests.simulation` runs more of them."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from random import Random

import pytest

from tests.simulation import virtual_time
from tests.simulation.cluster.faults import KINDS
from tests.simulation.cluster.long_run import LongRun
from tests.simulation.cluster.simulate import simulate
from tests.simulation.run_seeds import run_seeds

SEEDS = 250
REACHED = [
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
]


@pytest.mark.timeout(600)
def test_what_befalls_engines_changes_no_token() -> None:
    first = secrets.randbits(32)
    print(f"seeds {first} to {first + SEEDS - 1}")
    summary = run_seeds(range(first, first + SEEDS), os.cpu_count() or 1, world="cluster")
    assert not summary.failures, summary.failures[0]
    assert not [name for name in REACHED if not summary.counts[name]]


def test_a_seed_gives_the_same_tokens_at_the_same_times() -> None:
    for seed in range(8):
        assert simulate(seed) == simulate(seed)


@pytest.mark.timeout(600)
def test_a_cluster_under_load_is_balanced_and_finds_most_prefixes(tmp_path: Path) -> None:
    run = LongRun(Random(1), tmp_path, engines=8, frontends=2, requests_per_s=2000, seconds=2.0)
    summary = virtual_time.run(run.run())
    assert summary.counts["moves with tokens"]
    assert summary.cached_tokens > 0.75 * summary.ideal_cached_tokens
    assert max(summary.imbalances) < 2
