"""Places for which clients wait fairly."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable

from shared.round_robin import RoundRobin


class Places:
    """A number of places. Clients take turns, each with its oldest request: however many one asks
    for, another waits for one of them at a time.

    Args:
        count: how many may be taken at a time.
        may_enter: asked whether a client may have a place; call `look` once its answer may have
            changed.
    """

    def __init__(self, count: int, may_enter: Callable[[Hashable], bool]) -> None:
        self._num_free = count
        self._may_enter = may_enter
        self._waiting: RoundRobin[Hashable, asyncio.Future[None]] = RoundRobin()

    async def enter(self, client: Hashable) -> None:
        """Returns with a place, to be given back by `leave`."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(client, turn)
        self.look()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave()
            self._waiting.remove(client, turn)
            raise

    def leave(self) -> None:
        self._num_free += 1
        self.look()

    def look(self) -> None:
        """Gives out what places there are."""
        while self._num_free:
            heads = self._waiting.heads()
            if (head := next((each for each in heads if self._may_enter(each[0])), None)) is None:
                return
            turn = self._waiting.pop_of(head[0])
            if not turn.done():  # else it was cancelled
                self._num_free -= 1
                turn.set_result(None)
