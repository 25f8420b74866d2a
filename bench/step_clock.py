"""Tells other processes, through a shared file, when a token was sent."""

from __future__ import annotations

import mmap
import time
from pathlib import Path

_TIME_BYTES = 8


class StepClock:
    """A ring of times from `time.monotonic`, a clock that all processes of a machine share.

    All tokens of a step have one id, which is the index of the step's time in the ring.
    """

    def __init__(self, path: Path, slots: int) -> None:
        """Opens the ring in `path`, or creates an empty one."""
        path.touch()
        with path.open("r+b") as file:
            file.truncate(slots * _TIME_BYTES)
            self._times = memoryview(mmap.mmap(file.fileno(), 0)).cast("d")
        self._next = 0

    def tick(self) -> int:
        """Returns the token id for a step that is sent now."""
        token_id = self._next
        self._times[token_id] = time.monotonic()
        self._next = (token_id + 1) % len(self._times)
        return token_id

    def age_s(self, token_id: int, now: float) -> float:
        """Seconds from the sending of a token to `now`, valid until the ring has wrapped around."""
        return now - self._times[token_id]
