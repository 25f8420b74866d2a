"""Promise 1: a worker is killed, and streams go on as if nothing had happened."""

from __future__ import annotations

import pytest

from tests.faults.conftest import LONG_PROMPTS, Victim
from tests.faults.streams import LONG, REQUESTS, assert_undamaged, open_streams

TP = pytest.mark.parametrize("victim", [1, 2], ids=["TP 1", "TP 2"], indirect=True)
TP_AND_RANK = pytest.mark.parametrize(
    ("victim", "rank"),
    [(1, 0), (2, 0), (2, 1)],
    ids=["TP 1", "TP 2, rank 0", "TP 2, rank 1"],
    indirect=["victim"],
)


def surviving_pids(victim: Victim, killed_rank: int) -> dict[int, int]:
    ranks = set(range(victim.tp)) - {killed_rank}
    return {rank: victim.stack.pid("worker", rank) for rank in ranks}


@TP_AND_RANK
def test_killed_mid_decode(victim: Victim, rank: int) -> None:
    stack, survivors = victim.stack, surviving_pids(victim, rank)
    with open_streams(stack.address, REQUESTS) as streams:
        streams.wait_for_tokens(10, *LONG, "schema")
        pid = stack.kill("worker", rank, while_true=lambda: streams.are_open(*LONG))
        assert_undamaged(streams.wait_ended(), victim.expected)
    stack.wait_replaced("worker", rank, pid)
    victim.rest()
    assert surviving_pids(victim, rank) == survivors


@TP_AND_RANK
def test_killed_mid_prompt(victim: Victim, rank: int) -> None:
    stack, survivors = victim.stack, surviving_pids(victim, rank)
    before = stack.load()
    with open_streams(stack.address, LONG_PROMPTS) as streams:
        stack.wait_load(lambda load: load.step_tokens > before.step_tokens)
        # Prompts run one after another, so one of those without a token is in the middle.
        stack.kill("worker", rank, while_true=streams.any_without_a_token)
        assert_undamaged(streams.wait_ended(), victim.expected)
    victim.rest()
    assert surviving_pids(victim, rank) == survivors


@TP
def test_killed_again_and_again(victim: Victim) -> None:
    """Even while it starts and the others wait for it."""
    stack = victim.stack
    with open_streams(stack.address, REQUESTS) as streams:
        for count in (5, 20, 40):
            streams.wait_for_tokens(count, "greedy", "seeded")
            rank = count % victim.tp
            pid = stack.kill("worker", rank, while_true=lambda: streams.are_open("greedy"))
            stack.wait_replaced("worker", rank, pid)
            stack.kill("worker", rank)
        assert_undamaged(streams.wait_ended(), victim.expected)
    victim.rest()
