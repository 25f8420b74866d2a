"""Slots for which clients take turns (Nagle, RFC 970)."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Hashable


class Slots:
    """A number of slots. Clients take turns, each with its oldest request. However many slots one
    client asks for, another client waits for only one of them at a time.

    Args:
        count: the number of slots.
        make_room: returns whether a client may have a slot; call `fill` once the result may have
            changed.
    """

    def __init__(self, count: int, make_room: Callable[[Hashable], bool] = lambda _: True) -> None:
        self._num_free = count
        self._make_room = make_room
        # The turns of waiting requests by client, the next client first. None is empty.
        self._waiting: OrderedDict[Hashable, OrderedDict[asyncio.Future[None], None]]
        self._waiting = OrderedDict()

    async def enter(self, client: Hashable) -> None:
        """Waits for a slot and takes it. Give it back with `leave`."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, OrderedDict())[turn] = None
        self.fill()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave()
            self._remove(client, turn)
            raise

    def leave(self) -> None:
        self._num_free += 1
        self.fill()

    def fill(self) -> None:
        """Gives out the free slots."""
        while self._num_free:
            ready = (each for each in self._waiting.items() if self._make_room(each[0]))
            if (first := next(ready, None)) is None:
                return
            client, turns = first
            turn = next(iter(turns))
            self._waiting.move_to_end(client)
            self._remove(client, turn)
            if not turn.done():  # else it was cancelled
                self._num_free -= 1
                turn.set_result(None)

    def _remove(self, client: Hashable, turn: asyncio.Future[None]) -> None:
        if turns := self._waiting.get(client):
            turns.pop(turn, None)
            if not turns:
                del self._waiting[client]
