"""Whose turn it is to write, so that reading is never kept waiting."""

from __future__ import annotations

import asyncio
from collections import deque

# Each turn is a chunk written, some tens of microseconds of the event loop.
_AT_ONCE = 8


class Turns:
    """Gives a few turns each time the event loop goes round, first come first served.

    A step of the engine has a token for every open request. If all their chunks were written at
    once, and the engine were faster than that, its steps would pile up unread and latency would
    grow without a bound. With a few chunks at a time steps are read as they come, and a request
    whose turn comes late has the tokens of several in one chunk.
    """

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()

    def ask(self, turn: asyncio.Future[None]) -> None:
        """Has `turn` done when it has come."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._give)
        self._waiting.append(turn)

    def _give(self) -> None:
        for _ in range(min(_AT_ONCE, len(self._waiting))):
            turn = self._waiting.popleft()
            if not turn.done():  # who asked may have been cancelled
                turn.set_result(None)
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._give)
