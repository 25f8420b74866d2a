"""Pauses between tries, each twice as long as the one before (exponential backoff)."""

from __future__ import annotations


class Backoff:
    """The pauses after failures in a row.

    Args:
        first_s, last_s: the shortest and the longest pause, in seconds.
    """

    def __init__(self, first_s: float, last_s: float) -> None:
        self._first_s, self._last_s = first_s, last_s
        self._next_s = first_s

    def next_s(self) -> float:
        """The pause after one more failure, in seconds."""
        pause_s, self._next_s = self._next_s, min(2 * self._next_s, self._last_s)
        return pause_s

    def reset(self) -> None:
        """Forgets the failures: something worked."""
        self._next_s = self._first_s
