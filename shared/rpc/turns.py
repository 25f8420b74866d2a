"""Spreads work over the event loop's iterations, in turn among callers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from shared.round_robin import RoundRobin


class Turns:
    """Permits a few pieces of work per iteration of the event loop, round robin among the callers
    (Nagle, RFC 970). However much work a caller has, the others also get turns."""

    def __init__(self, per_iteration: int) -> None:
        self._per_iteration = per_iteration
        self._waiting: RoundRobin[str, asyncio.Future[None]] = RoundRobin()
        self._rests_until = 0.0  # loop time

    def request(self, caller: str, permit: asyncio.Future[None]) -> None:
        """Resolves `permit` at the caller's turn, after the caller's older permits."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._grant)
        self._waiting.add(caller, permit)

    async def take(self, caller: str) -> None:
        """Returns at the caller's next turn."""
        permit: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.request(caller, permit)
        await permit

    @asynccontextmanager
    async def half_the_time(self, caller: str) -> AsyncIterator[None]:
        """Waits for a turn for work that awaits nothing. After the work, no caller has a turn for
        as long as the work took."""
        await self.take(caller)
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            yield
        finally:
            now = loop.time()
            self._rests_until = now + (now - began)

    def _grant(self) -> None:
        loop = asyncio.get_running_loop()
        if loop.time() < self._rests_until:
            loop.call_at(self._rests_until, self._grant)
            return
        granted = 0
        while self._waiting and granted < self._per_iteration:
            permit = self._waiting.pop()
            if not permit.done():  # else its owner was cancelled
                permit.set_result(None)
                granted += 1
        if self._waiting:
            loop.call_soon(self._grant)
