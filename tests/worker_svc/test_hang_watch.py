"""Tells hangs from what is none. Times are short, waits are for events."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from worker_svc.hang_watch import FIRST_STEP_S, HangWatch, StepTimeLimits, size_of
from worker_svc.step.arrays import DRAFTED, StepArrays

from .harness import Batch, limits

HANG_S = 0.2


def step_of(num_tokens: int, context_len: int = 0) -> StepArrays:
    batch = Batch(limits(max_model_len=100_000, max_num_batched_tokens=100_000, num_blocks=8000))
    batch.contexts[0] = context_len
    return batch.step([(0, [1] * num_tokens)])


class Watched:
    """A watch, how often it has looked at an activity, and its verdict."""

    def __init__(self) -> None:
        self.reason = ""
        self.gave_up = threading.Event()
        self.waits_for_ranks = self.compiles = False
        self._looks = 0
        self._looked = threading.Condition()
        self.watch = HangWatch(HANG_S, lambda: self.waits_for_ranks, self._look, self._give_up)

    def _look(self) -> bool:
        with self._looked:
            self._looks += 1
            self._looked.notify_all()
        return self.compiles

    def _give_up(self, reason: str) -> None:
        self.reason = reason
        self.gave_up.set()
        self.watch.stop()

    def looks(self, times: int) -> None:
        """Returns after `times` looks of the watch at what is going on."""
        with self._looked:
            target = self._looks + times
            assert self._looked.wait_for(lambda: self._looks >= target, 60)


@pytest.fixture
def watched() -> Iterator[Watched]:
    watched = Watched()
    watched.watch.start()
    yield watched
    watched.watch.stop()


def test_a_first_step_may_compile_and_later_ones_may_not_hang(watched: Watched) -> None:
    started = time.monotonic()
    with watched.watch.running(step_of(1), 0.0):
        watched.looks(30)
    assert not watched.gave_up.is_set()
    watched.watch.record(step_of(1), time.monotonic() - started)
    with watched.watch.running(step_of(1), 0.0):  # as long is allowed again, several times over
        watched.looks(15)
        assert not watched.gave_up.is_set()
        assert watched.gave_up.wait(60)


def test_waiting_for_other_ranks_is_no_hang(watched: Watched) -> None:
    watched.waits_for_ranks = True
    with watched.watch.doing("step 3", 0.0):
        watched.looks(30)
        assert not watched.gave_up.is_set()
        watched.waits_for_ranks = False
        assert watched.gave_up.wait(60)


def test_a_kernel_may_be_compiled_in_any_step(watched: Watched) -> None:
    """Any step may need a variant that none of its size has needed so far; but not for ever."""
    with watched.watch.doing("step 3", 0.0):
        watched.compiles = True
        watched.looks(30)
        assert not watched.gave_up.is_set()
    watched.compiles = False
    with watched.watch.doing("step 4", 0.0):
        assert watched.gave_up.wait(60)
    assert watched.reason == "step 4 does not end"


def test_many_short_activities_are_no_hang(watched: Watched) -> None:
    for _ in range(40):
        with watched.watch.doing("a step", 60.0):
            watched.looks(1)
    assert not watched.gave_up.is_set()


def test_a_step_may_take_a_few_times_as_long_as_those_of_its_size() -> None:
    times = StepTimeLimits()
    small, large = size_of(step_of(1)), size_of(step_of(512))
    assert times.max_s(small) == FIRST_STEP_S
    times.record(small, 0.5)
    times.record(small, 0.1)
    assert times.max_s(small) == pytest.approx(2.0)
    # A step much larger than any before gets as much more time.
    assert times.max_s(large) > 512
    times.record(large, 3.0)
    assert times.max_s(large) == pytest.approx(12.0)


def test_work_grows_with_tokens_and_context() -> None:
    sizes = [size_of(step_of(*args)) for args in ((1, 0), (64, 0), (64, 8000), (2048, 8000))]
    assert sizes == sorted(set(sizes))


def test_drafted_tokens_make_a_step_larger() -> None:
    """Each may take a pass of the draft model."""
    sizes = []
    for token in (1, DRAFTED):
        batch = Batch(limits(drafts=True))
        sizes.append(size_of(batch.step([(0, [1]), *[(0, [token])] * 4])))
    assert sizes[0] < sizes[1]
