"""Events that count as one fault, and its cost."""

from __future__ import annotations

from collections.abc import Mapping

from deploy.dashboard.faults import Fault, Faults


def serving(pids: Mapping[str, int | None]) -> Faults:
    """A stack that has started: its processes may have been replaced meanwhile."""
    faults = Faults()
    faults.observe({**pids, "worker-0": 9}, 0.0)
    faults.observe(pids, 1.0)
    faults.set_serving(True, 2.0)
    assert not faults.recent
    return faults


def test_a_pause_lasts_until_the_stack_serves_again() -> None:
    faults = serving({"worker-0": 1, "scheduler-0": 2})
    faults.set_serving(False, 10.0)
    faults.observe({"worker-0": None, "scheduler-0": 2}, 10.1)
    assert list(faults.recent) == [Fault(10.0, None, ["worker-0"])]
    assert faults.recent[0].pause_s is None
    faults.observe({"worker-0": 3, "scheduler-0": 4}, 10.5)  # another is lost meanwhile
    faults.set_serving(True, 11.0)
    assert list(faults.recent) == [Fault(10.0, 11.0, ["worker-0", "scheduler-0"])]
    assert faults.restarts == {"worker-0": 1, "scheduler-0": 1}


def test_a_loss_shortly_before_or_after_a_pause_belongs_to_it() -> None:
    faults = serving({"worker-0": 1, "scheduler-0": 2})
    faults.observe({"worker-0": 3}, 9.9)
    faults.set_serving(False, 10.0)
    faults.set_serving(True, 10.5)
    faults.observe({"scheduler-0": 4}, 11.0)
    assert list(faults.recent) == [Fault(10.0, 10.5, ["worker-0", "scheduler-0"])]


def test_a_fault_without_a_pause() -> None:
    faults = serving({"frontend-0": 1, "frontend-1": 2})
    faults.observe({"frontend-1": None}, 10.0)
    for second in (11.0, 20.0):  # it is the same loss for as long as it is gone
        faults.observe({"frontend-1": None}, second)
    faults.observe({"frontend-1": 3}, 30.0)
    assert [each.pause_s for each in faults.recent] == [0.0]
    assert faults.restarts == {"frontend-1": 1}
    faults.observe({"frontend-1": 4}, 40.0)
    assert [each.lost for each in faults.recent] == [["frontend-1"]] * 2


def test_a_pause_without_a_lost_process() -> None:
    faults = serving({"worker-0": 1})
    faults.set_serving(False, 10.0)
    faults.observe({"worker-0": 1}, 10.1)
    faults.set_serving(True, 12.0)
    assert list(faults.recent) == [Fault(10.0, 12.0, [])]
    assert not faults.restarts
