"""Events that tell watchers which blocks the prefix cache stores and removes."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import NamedTuple

# Maximum of unread events of a watch: those of a large cache that is filled twice.
MAX_UNREAD = 1 << 18
# Maximum of watches of a cache. Watchers are frontends that choose among engines, and operators.
MAX_WATCHES = 16


class StoredBlock(NamedTuple):
    """A published block. `parent` is the name of the block before it, None for a prompt's first."""

    name: bytes
    parent: bytes | None
    token_ids: bytes  # int32[block_size]
    cache_salt: str


class Removed(NamedTuple):
    name: bytes


class Cleared(NamedTuple):
    """Nothing is stored any more."""


BlockEvent = StoredBlock | Removed | Cleared


class BlockWatch:
    """The events that one watcher has not read."""

    def __init__(self) -> None:
        self.fell_behind = False  # events were dropped, and none follow
        self._events: list[BlockEvent] = []
        self._news = asyncio.Event()

    def add(self, event: BlockEvent) -> None:
        if self.fell_behind:
            return
        self._events.append(event)
        if len(self._events) > MAX_UNREAD:
            self._events.clear()
            self.fell_behind = True
        self._news.set()

    def take(self) -> list[BlockEvent]:
        """Returns the events since the last call."""
        self._news.clear()
        events, self._events = self._events, []
        return events

    async def read(self, timeout_s: float) -> list[BlockEvent]:
        """Waits up to `timeout_s` seconds for an event, and returns all unread events."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._news.wait()
        return self.take()
