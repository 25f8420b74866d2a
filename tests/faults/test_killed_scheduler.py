"""Promise 2: the scheduler is killed, and the frontends bring the next one up to date."""

from __future__ import annotations

from tests.faults.conftest import LONG_PROMPTS, Victim
from tests.faults.streams import REQUESTS, assert_undamaged, open_streams


def worker_pids(victim: Victim) -> list[int]:
    return [victim.stack.pid("worker", rank) for rank in range(victim.tp)]


def test_killed_mid_decode(victim: Victim) -> None:
    stack, workers = victim.stack, worker_pids(victim)
    with open_streams(stack.address, REQUESTS) as streams:
        streams.wait_for_tokens(10, "greedy", "seeded", "penalties", "several", "schema")
        open_then = set(streams.open)
        pid = stack.kill("scheduler")
        assert_undamaged(streams.wait_ended(), victim.expected)
    assert {"greedy", "seeded", "filters", "penalties", "several", "stop string"} <= open_then
    stack.wait_replaced("scheduler", 0, pid)
    victim.rest()
    assert worker_pids(victim) == workers  # they accepted the new scheduler's epoch


def test_killed_mid_prompt(victim: Victim) -> None:
    stack, before = victim.stack, victim.stack.load()
    with open_streams(stack.address, LONG_PROMPTS) as streams:
        stack.wait_load(lambda load: load.step_tokens > before.step_tokens)
        without_a_token = [t for t in streams.transcripts.values() if not t.num_tokens]
        stack.kill("scheduler")
        assert without_a_token
        assert_undamaged(streams.wait_ended(), victim.expected)
    victim.rest()


def test_killed_together_with_a_worker(victim: Victim) -> None:
    stack = victim.stack
    with open_streams(stack.address, REQUESTS) as streams:
        streams.wait_for_tokens(10, "greedy", "seeded")
        stack.kill("worker", victim.tp - 1)
        stack.kill("scheduler")
        assert_undamaged(streams.wait_ended(), victim.expected)
    victim.rest()


def test_killed_again_and_again(victim: Victim) -> None:
    stack = victim.stack
    with open_streams(stack.address, REQUESTS) as streams:
        for count in (5, 20, 40):
            streams.wait_for_tokens(count, "greedy", "seeded")
            stack.wait_replaced("scheduler", 0, stack.kill("scheduler"))
        assert_undamaged(streams.wait_ended(), victim.expected)
    victim.rest()
