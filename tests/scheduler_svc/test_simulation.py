"""Runs of the deterministic simulation; `python -m tests.simulation` runs more of them."""

from __future__ import annotations

import os
import secrets

import pytest

from scheduler_svc.sequence import FinishCause
from tests.simulation.run_seeds import run_seeds
from tests.simulation.simulate import simulate

SEEDS = 500
REACHED = [
    *(f"ended {cause.name}" for cause in FinishCause),
    "cached prompt tokens",
    "copies",
    "disconnects",
    "logprobs",
    "losses",
    "poisonings",
    "preemptions",
    "prompt logprobs",
    "resumed",
    "rows mid-prompt",
    "siblings",
    "tokens not known yet",
]


@pytest.mark.timeout(600)
def test_simulated_traffic_and_faults_change_no_token() -> None:
    first = secrets.randbits(32)
    print(f"seeds {first} to {first + SEEDS - 1}")
    summary = run_seeds(range(first, first + SEEDS), os.cpu_count() or 1)
    assert not summary.failures, summary.failures[0]
    assert not [name for name in REACHED if not summary.counts[name]]


@pytest.mark.parametrize("seed", [3, 14])
def test_a_seed_gives_the_same_steps_again(seed: int) -> None:
    first, second = simulate(seed), simulate(seed)
    assert first.counts["steps"] > 0
    assert first == second
