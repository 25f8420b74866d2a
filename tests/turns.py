"""Counts work per turn of an event loop, so that tests notice stalls without a clock."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class Turns:
    """`done` is called with an amount of work; `max` is the largest sum of any one turn."""

    def __init__(self) -> None:
        self.max = self.total = self._now = 0

    def done(self, amount: int) -> None:
        self.total += amount
        self._now += amount
        self.max = max(self.max, self._now)

    def _next(self) -> None:
        self._now = 0
        self._handle = asyncio.get_running_loop().call_soon(self._next)

    def _stop(self) -> None:
        self._handle.cancel()


@contextmanager
def counting_turns() -> Iterator[Turns]:
    turns = Turns()
    turns._next()
    try:
        yield turns
    finally:
        turns._stop()
