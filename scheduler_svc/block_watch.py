"""Events that tell watchers which blocks the prefix cache stores and removes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from scheduler_svc.core.blocks.block_manager import BlockManager
from scheduler_svc.core.blocks.cache_listener import CacheListener, StoredBlock

# Maximum of unread events of a watch: those of a large cache that is filled twice.
MAX_UNREAD = 1 << 18
# Maximum of watches of a cache. Watchers are frontends that choose among engines.
MAX_WATCHES = 16


class Removed(NamedTuple):
    name: bytes


class Cleared(NamedTuple):
    """Nothing is stored any more."""


BlockEvent = StoredBlock | Removed | Cleared


class BlockWatch(CacheListener):
    """The events, of blocks in first tables, that one watcher has not read."""

    def __init__(self) -> None:
        self.fell_behind = False  # events were dropped, and none follow
        self._events: list[BlockEvent] = []
        self._news = asyncio.Event()

    def stored(self, block: int, content: StoredBlock) -> None:
        if content.token_ids:
            self._add(content)

    def removed(self, block: int, content: StoredBlock) -> None:
        if content.token_ids:
            self._add(Removed(content.name))

    def cleared(self) -> None:
        self._add(Cleared())

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

    def _add(self, event: BlockEvent) -> None:
        if self.fell_behind:
            return
        self._events.append(event)
        if len(self._events) > MAX_UNREAD:
            self._events.clear()
            self.fell_behind = True
        self._news.set()


@contextmanager
def watched(blocks: BlockManager) -> Iterator[BlockWatch]:
    """Opens a watch, which receives the blocks that are published and evicted meanwhile."""
    watch = BlockWatch()
    blocks.listeners.append(watch)
    try:
        yield watch
    finally:
        blocks.listeners.remove(watch)


def watches_of(blocks: BlockManager) -> list[BlockWatch]:
    return [each for each in blocks.listeners if isinstance(each, BlockWatch)]
