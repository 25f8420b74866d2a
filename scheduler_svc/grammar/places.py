"""Places for which clients wait fairly."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable


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
        self._waiting: OrderedDict[Hashable, deque[asyncio.Future[None]]] = OrderedDict()

    async def enter(self, client: Hashable) -> None:
        """Returns with a place, to be given back by `leave`."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(turn)
        self.look()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave()
            raise

    def leave(self) -> None:
        self._num_free += 1
        self.look()

    def look(self) -> None:
        """Gives out what places there are."""
        for client in [*self._waiting]:
            turns = self._waiting[client]
            while turns and turns[0].done():  # cancelled
                turns.popleft()
            if not turns:
                del self._waiting[client]
            elif self._num_free and self._may_enter(client):
                self._num_free -= 1
                turns.popleft().set_result(None)
                self._waiting.move_to_end(client)
                return self.look()
