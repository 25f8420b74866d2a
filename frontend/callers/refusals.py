"""Slows down callers whose calls are refused again and again: floods of these cost them little."""

from __future__ import annotations

import asyncio
from collections import Counter
from math import inf

# Refusals per second that a caller gets at once, after as many in a burst. The next ones wait, but
# no more than that many: whoever has them all open may as well have their answers.
_PER_SECOND = 50.0
_MAX_WAITING = 128
_MAX_CALLERS = 1024  # remembered at a time


class Refusals:
    """Paces refusals by caller. Use it on the event loop."""

    def __init__(self) -> None:
        self._next: dict[str, float] = {}  # when the caller's next refusal is due, loop time
        self._waiting: Counter[str] = Counter()

    async def wait(self, caller: str) -> None:
        """Returns when `caller` may learn that its call is refused: at once, unless it has had many
        refusals lately."""
        now = asyncio.get_running_loop().time()
        due = max(self._next.get(caller, -inf), now - 1.0)
        if self._waiting[caller] < _MAX_WAITING and self._has_room(caller, now):
            self._next[caller] = due + 1 / _PER_SECOND
            await self._sleep(caller, due - now)

    async def _sleep(self, caller: str, seconds: float) -> None:
        if seconds > 0:
            self._waiting[caller] += 1
            try:
                await asyncio.sleep(seconds)
            finally:
                self._waiting[caller] -= 1
                if not self._waiting[caller]:
                    del self._waiting[caller]

    def _has_room(self, caller: str, now: float) -> bool:
        """Whether `caller` is remembered, or can be."""
        if caller not in self._next and len(self._next) >= _MAX_CALLERS:
            self._next = {each: due for each, due in self._next.items() if due > now}
        return caller in self._next or len(self._next) < _MAX_CALLERS
