"""When a token was sent, told to other processes through a shared file."""

from __future__ import annotations

import mmap
import time
from pathlib import Path

_TIME_BYTES = 8


class StepClock:
    """A ring of times on the clock of `time.monotonic`, which processes of a machine share.

    A step's tokens all have the same id, the index of its time in the ring.
    """

    def __init__(self, path: Path, slots: int) -> None:
        """Opens the ring in `path`, an empty one if there is no such file."""
        path.touch()
        with path.open("r+b") as file:
            file.truncate(slots * _TIME_BYTES)
            self._times = memoryview(mmap.mmap(file.fileno(), 0)).cast("d")
        self._next = 0

    def tick(self) -> int:
        """The token id of a step that is sent now."""
        token_id = self._next
        self._times[token_id] = time.monotonic()
        self._next = (token_id + 1) % len(self._times)
        return token_id

    def age_s(self, token_id: int, now: float) -> float:
        """How long before `now` a token was sent; wrong once the ring has gone round."""
        return now - self._times[token_id]
