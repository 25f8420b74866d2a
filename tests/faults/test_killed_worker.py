"""Promise 1: a worker is killed, and streams go on as if nothing had happened."""

from __future__ import annotations

import pytest

from tests.faults.conftest import LONG_PROMPTS, Victim
from tests.faults.streams import REQUESTS, assert_undamaged, open_streams


def surviving_pids(victim: Victim, killed_rank: int) -> dict[int, int]:
    ranks = set(range(victim.tp)) - {killed_rank}
    return {rank: victim.stack.pid("worker", rank) for rank in ranks}


def killed_rank(victim: Victim, rank: int) -> int:
    if rank >= victim.tp:
        pytest.skip(f"there is no rank {rank}")
    return rank


@pytest.mark.parametrize("rank", [0, 1])
def test_killed_mid_decode(victim: Victim, rank: int) -> None:
    stack, rank = victim.stack, killed_rank(victim, rank)
    survivors = surviving_pids(victim, rank)
    with open_streams(stack.address, REQUESTS) as streams:
        streams.wait_for_tokens(10, "greedy", "seeded", "penalties", "several", "schema")
        open_then = set(streams.open)
        pid = stack.kill("worker", rank)
        found = streams.wait_ended()
    assert {"greedy", "seeded", "filters", "penalties", "several", "stop string"} <= open_then
    assert_undamaged(found, victim.expected)
    stack.wait_replaced("worker", rank, pid)
    victim.rest()
    assert surviving_pids(victim, rank) == survivors


@pytest.mark.parametrize("rank", [0, 1])
def test_killed_mid_prompt(victim: Victim, rank: int) -> None:
    stack, rank = victim.stack, killed_rank(victim, rank)
    survivors = surviving_pids(victim, rank)
    before = stack.load()
    with open_streams(stack.address, LONG_PROMPTS) as streams:
        stack.wait_load(lambda load: load.step_tokens > before.step_tokens)
        without_a_token = [t for t in streams.transcripts.values() if not t.num_tokens]
        stack.kill("worker", rank)
        assert without_a_token  # prompts run one after another, so one was in the middle
        assert_undamaged(streams.wait_ended(), victim.expected)
    victim.rest()
    assert surviving_pids(victim, rank) == survivors


def test_killed_again_and_again(victim: Victim) -> None:
    """Even while it starts and the others wait for it."""
    stack = victim.stack
    with open_streams(stack.address, REQUESTS) as streams:
        for count in (5, 20, 40):
            streams.wait_for_tokens(count, "greedy", "seeded")
            pid = stack.kill("worker", count % victim.tp)
            stack.wait_replaced("worker", count % victim.tp, pid)
            stack.kill("worker", count % victim.tp)
        assert_undamaged(streams.wait_ended(), victim.expected)
    victim.rest()
