"""An exponentially decaying rate."""

from __future__ import annotations

import math


class Rate:
    """Events per second over roughly the last `window_s` seconds, the most recent weighing most.

    Times are seconds of one clock, never decreasing.
    """

    def __init__(self, now: float, window_s: float = 10.0) -> None:
        self._window_s = window_s
        self._start = self._last = now
        self._weight = 0.0

    def add(self, count: float, now: float) -> None:
        """Counts `count` events at `now`."""
        self._weight = self._decayed(now) + count
        self._last = now

    def per_second(self, now: float) -> float:
        # The window is not full at the start. A second at least, lest one event be a high rate.
        seconds = self._window_s * -math.expm1(-max(now - self._start, 1.0) / self._window_s)
        return self._decayed(now) / seconds

    def _decayed(self, now: float) -> float:
        return self._weight * math.exp((self._last - now) / self._window_s)
