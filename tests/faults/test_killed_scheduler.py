"""Promise 2: the scheduler is killed, and the frontends bring the next one up to date; or the
processes of grammars beside it are."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tests.faults.conftest import LONG_PROMPTS, Victim
from tests.faults.streams import LONG, REQUESTS, assert_undamaged, open_streams
from tests.stack import RealStack
from tests.waiting import wait_for

pytestmark = pytest.mark.parametrize("victim", [2], ids=["TP 2"], indirect=True)


def worker_pids(victim: Victim) -> list[int]:
    return [victim.stack.pid("worker", rank) for rank in range(victim.tp)]


def of_grammars(stack: RealStack) -> list[psutil.Process]:
    """The processes that have mapped xgrammar: first the host, then those of the grammars."""
    parent = psutil.Process(stack.pid("scheduler")).parent()
    assert parent is not None
    found = [each for each in parent.children(recursive=True) if maps(each.pid, "xgrammar")]
    return sorted(found, key=lambda each: len(each.parents()))


def maps(pid: int, library: str) -> bool:
    try:
        return library in Path(f"/proc/{pid}/maps").read_text()
    except OSError:  # it has just ended
        return False


def test_killed_mid_decode(victim: Victim) -> None:
    stack, workers = victim.stack, worker_pids(victim)
    with open_streams(stack.address, REQUESTS) as streams:
        streams.wait_for_tokens(10, *LONG, "schema")
        host, *_ = of_grammars(stack)
        pid = stack.kill("scheduler", while_true=lambda: streams.are_open(*LONG))
        assert_undamaged(streams.wait_ended(), victim.expected)
    stack.wait_replaced("scheduler", 0, pid)
    victim.rest()
    assert worker_pids(victim) == workers  # they accepted the new scheduler's epoch
    assert host.is_running()
    assert not maps(stack.pid("scheduler"), "libtorch")


def test_killed_mid_prompt(victim: Victim) -> None:
    stack, before = victim.stack, victim.stack.load()
    with open_streams(stack.address, LONG_PROMPTS) as streams:
        stack.wait_load(lambda load: load.step_tokens > before.step_tokens)
        stack.kill("scheduler", while_true=streams.any_without_a_token)
        assert_undamaged(streams.wait_ended(), victim.expected)
    victim.rest()


def test_killed_together_with_a_worker(victim: Victim) -> None:
    stack = victim.stack
    with open_streams(stack.address, REQUESTS) as streams:
        streams.wait_for_tokens(10, "greedy", "seeded")
        stack.kill("worker", victim.tp - 1, while_true=lambda: streams.are_open("greedy", "seeded"))
        stack.kill("scheduler")
        assert_undamaged(streams.wait_ended(), victim.expected)
    victim.rest()


def test_killed_again_and_again(victim: Victim) -> None:
    stack = victim.stack
    with open_streams(stack.address, REQUESTS) as streams:
        for count in (5, 20, 40):
            streams.wait_for_tokens(count, "greedy", "seeded")
            pid = stack.kill("scheduler", while_true=lambda: streams.are_open("greedy"))
            stack.wait_replaced("scheduler", 0, pid)
        assert_undamaged(streams.wait_ended(), victim.expected)
    victim.rest()


@pytest.mark.parametrize("host_too", [False, True], ids=["grammars", "host and grammars"])
def test_grammars_killed_mid_decode(victim: Victim, host_too: bool) -> None:
    stack, scheduler = victim.stack, victim.stack.pid("scheduler")
    with open_streams(stack.address, REQUESTS) as streams:
        streams.wait_for_tokens(8, "schema", "regex")
        host, *grammars = wait_for(lambda: of_grammars(stack), "grammars to be compiled")
        assert grammars
        killed = [host, *grammars] if host_too else grammars
        for each in killed:
            each.suspend()
        try:
            streams.require_open("schema", "regex")
        finally:
            for each in killed:
                each.kill()
        assert_undamaged(streams.wait_ended(), victim.expected)
    victim.rest()
    assert stack.pid("scheduler") == scheduler
    assert not maps(scheduler, "libtorch")
