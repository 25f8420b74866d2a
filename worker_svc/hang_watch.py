"""Ends a worker that hangs, so that its supervisor starts a new one.

Threads report what they are doing and how long that may take. A watching thread checks on them. It
counts its own polls instead of reading a clock. So time in which the whole process was stopped, or
got no processor, does not count.

The watch cannot notice that its own process is stopped, or that an extension holds Python's lock.
The RPC loop stops in these cases too, and the parent process notices that
(`shared.process.parent_process`).
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import structlog

from worker_svc.step.arrays import StepArrays

log = structlog.get_logger(__name__)

EXIT_HUNG = 75  # EX_TEMPFAIL of sysexits.h
# The limit for the first step of a size, which may compile kernels.
FIRST_STEP_S = 60.0
# A later step may take this many times as long as the longest step of its size so far.
_SLACK = 4.0
# At a context of about a thousand tokens, attention costs as much as everything else.
_CONTEXT_UNIT = 1024
_POLLS = 10  # per `hang_timeout_s`


class StepTimeLimits:
    """Learns limits on the time of a step from earlier steps of its size, see `size_of`. A step
    takes milliseconds on a GPU and up to minutes on a CPU. Threads may record while others read."""

    def __init__(self) -> None:
        self._longest: dict[int, float] = {}  # seconds, by size

    def max_s(self, size: int) -> float:
        if size in self._longest:
            return _SLACK * self._longest[size]
        smaller = [other for other in tuple(self._longest) if other < size]
        if not smaller:
            return FIRST_STEP_S
        nearest = max(smaller)
        return max(FIRST_STEP_S, _SLACK * self._longest[nearest] * 2.0 ** (size - nearest))

    def record(self, size: int, seconds: float) -> None:
        self._longest[size] = max(seconds, self._longest.get(size, 0.0))


@dataclass(eq=False)
class _Activity:
    what: str
    max_s: float
    step: StepArrays | None = None  # it may take as long as a step of this size, too
    seconds: float = 0.0  # watched so far, since it last waited for other ranks


class HangWatch:
    """Watches the activities of threads.

    Args:
        hang_timeout_s: how many seconds an activity may exceed its limit.
        waits_for_ranks: whether a collective is waiting now. Collectives have their own timeout,
            and then another rank hangs, not this one.
        compiles: whether a kernel may be compiling now. Every activity meanwhile may take as long
            as the first step of a size.
        give_up: called with the reason, on the watch's thread.
    """

    def __init__(
        self,
        hang_timeout_s: float,
        waits_for_ranks: Callable[[], bool],
        compiles: Callable[[], bool] = lambda: False,
        give_up: Callable[[str], None] | None = None,
    ) -> None:
        self._hang_timeout_s = hang_timeout_s
        self._waits_for_ranks = waits_for_ranks
        self._compiles = compiles
        self._give_up = give_up or end_process
        self._activities: dict[_Activity, None] = {}
        self._times = StepTimeLimits()
        self._stopped = threading.Event()

    def start(self) -> None:
        """Watches until `stop`."""
        threading.Thread(target=self._run, name="hang-watch", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    @contextmanager
    def doing(self, what: str, max_s: float, step: StepArrays | None = None) -> Iterator[None]:
        """Watches the body of the `with`, which may take `max_s` seconds, or as long as `step`."""
        activity = _Activity(what, max_s, step)
        self._activities[activity] = None
        try:
            yield
        finally:
            del self._activities[activity]

    def running(self, step: StepArrays, min_s: float) -> AbstractContextManager[None]:
        """Watches a step's launch, or the wait for its results. The limit is at least `min_s`
        seconds."""
        return self.doing(f"step {step.step_id}", min_s, step)

    def record(self, step: StepArrays, seconds: float) -> None:
        """Learns how long a step took: the seconds from its launch to its end, or the seconds of
        the wait for its results."""
        self._times.record(size_of(step), seconds)

    def _run(self) -> None:
        poll_s = self._hang_timeout_s / _POLLS
        while not self._stopped.wait(poll_s):
            for activity in tuple(self._activities):
                if self._compiles():
                    activity.max_s = max(activity.max_s, FIRST_STEP_S)
                activity.seconds = 0.0 if self._waits_for_ranks() else activity.seconds + poll_s
                if activity.seconds >= self._hang_timeout_s + self._max_s(activity):
                    self._give_up(f"{activity.what} does not end")

    def _max_s(self, activity: _Activity) -> float:
        if activity.step is None:
            return activity.max_s
        return max(activity.max_s, self._times.max_s(size_of(activity.step)))


def end_process(reason: str) -> None:
    """Reports where each thread is, and ends the process without waiting for its threads."""
    # If no process reads the log any more, writing to it may hang too.
    writer = threading.Thread(target=_report, args=(reason,), daemon=True)
    writer.start()
    writer.join(0.5)
    os._exit(EXIT_HUNG)


def _report(reason: str) -> None:
    log.error("worker hangs; ending this process", reason=reason)
    faulthandler.dump_traceback(sys.stderr)


def size_of(step: StepArrays) -> int:
    """The bit length of a step's work. A token counts more the longer its context is. Each drafted
    token may take a pass of the draft model over all sequences."""
    work = step.query_lens * (1 + step.context_lens / _CONTEXT_UNIT)
    return int(work.sum() * (1 + len(step.drafted_rows))).bit_length()
