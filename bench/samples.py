"""Values that are read again and again beside a measurement."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, Self, TypeVar

Value = TypeVar("Value")


class Samples(Generic[Value]):
    """Reads a value again and again in a thread, while it is entered.

    Args:
        period_s: seconds from one reading to the next.
        share: maximum share of the time that reading takes; the period becomes longer if need be.
    """

    def __init__(self, read: Callable[[], Value], period_s: float, share: float = 1.0) -> None:
        self.found: list[tuple[float, Value]] = []  # with the time before each reading
        self._read, self._period_s, self._share = read, period_s, share
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _sample(self) -> None:
        pause_s = 0.0
        while not self._over.wait(pause_s):
            start = time.perf_counter()
            self.found.append((start, self._read()))
            spent_s = time.perf_counter() - start
            pause_s = max(self._period_s, spent_s / self._share) - spent_s
