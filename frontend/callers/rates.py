"""Spaces each caller's actions, so that a flood costs little and delays no other caller."""

from __future__ import annotations

from math import inf

_MAX_CALLERS = 1024  # remembered at a time


class CallerRates:
    """Spaces each caller's actions to `per_second`, after a burst of as many (the generic cell rate
    algorithm of ITU-T I.371). Times are in seconds, by any one clock.

    Args:
        max_delay_s: an action that would be due later is not spaced and does not count.
    """

    def __init__(self, per_second: float, max_delay_s: float = 0.0) -> None:
        self._interval_s = 1 / per_second
        self._max_delay_s = max_delay_s
        self._due: dict[str, float] = {}  # when the caller's last action was due

    def delay_s(self, caller: str, now: float) -> float | None:
        """The time until a caller's next action is due, 0 if it is due now. None if that is above
        `max_delay_s`, or if too many callers are remembered."""
        if caller not in self._due and len(self._due) >= _MAX_CALLERS:
            self._due = {each: due for each, due in self._due.items() if due > now - 1}
            if len(self._due) >= _MAX_CALLERS:
                return None
        due = max(self._due.get(caller, -inf), now - 1) + self._interval_s
        delay_s = max(due - now, 0.0)
        if delay_s > self._max_delay_s:
            return None
        self._due[caller] = due
        return delay_s
