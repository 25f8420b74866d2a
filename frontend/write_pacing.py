"""Spreads writes over the event loop's iterations, so that reading is never kept waiting."""

from __future__ import annotations

import asyncio
from collections import deque

# Writing a chunk takes the event loop some tens of microseconds.
_WRITES_PER_ITERATION = 8


class WritePacer:
    """Permits a few writes per iteration of the event loop, first come first served.

    A step of the engine has a token for every open request. If all their chunks were written at
    once and the engine were faster than that, its steps would pile up unread and latency would grow
    without bound. With a few chunks at a time, steps are read as they arrive, and a request that
    waits long for its permit gets the tokens of several steps in one chunk.
    """

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()

    def request(self, permit: asyncio.Future[None]) -> None:
        """Resolves `permit` as soon as its owner may write."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._grant)
        self._waiting.append(permit)

    def _grant(self) -> None:
        for _ in range(min(_WRITES_PER_ITERATION, len(self._waiting))):
            permit = self._waiting.popleft()
            if not permit.done():  # its owner may have been cancelled
                permit.set_result(None)
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._grant)
