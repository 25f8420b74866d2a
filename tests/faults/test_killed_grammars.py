"""Promise 2, for structured output: grammars' processes, and the host that forks them, are killed,
and streams do not notice."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tests.faults.conftest import Victim
from tests.faults.streams import REQUESTS, assert_undamaged, open_streams
from tests.stack import RealStack
from tests.waiting import wait_for


def loaded(stack: RealStack) -> list[psutil.Process]:
    """The processes that have mapped xgrammar: first the host, then those of the grammars."""
    keeper = psutil.Process(stack.pid("scheduler")).parent()
    assert keeper is not None
    found = [each for each in keeper.children(recursive=True) if maps(each.pid, "xgrammar")]
    return sorted(found, key=lambda each: len(each.parents()))


def maps(pid: int, library: str) -> bool:
    try:
        return library in Path(f"/proc/{pid}/maps").read_text()
    except OSError:  # it has just ended
        return False


@pytest.mark.parametrize("whom", ["grammars", "host and grammars", "scheduler"])
def test_killed_mid_decode(victim: Victim, whom: str) -> None:
    stack = victim.stack
    scheduler = stack.pid("scheduler")
    with open_streams(stack.address, REQUESTS) as streams:
        streams.wait_for_tokens(8, "schema", "regex")
        host, *grammars = wait_for(lambda: loaded(stack), "grammars to be compiled")
        assert {"schema", "regex"} <= streams.open
        assert grammars
        assert not maps(scheduler, "libtorch")
        if whom == "scheduler":
            stack.kill("scheduler")
        for each in ([host] if "host" in whom else []) + (grammars if "grammars" in whom else []):
            each.kill()
        assert_undamaged(streams.wait_ended(), victim.expected)
    if whom == "scheduler":
        stack.wait_replaced("scheduler", 0, scheduler)
        assert host.is_running()
    assert (stack.pid("scheduler") == scheduler) == (whom != "scheduler")
    assert not maps(stack.pid("scheduler"), "libtorch")
    victim.rest()
