"""The prefix cache's contents as told to those who watch it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

# Events that may wait to be read: a large cache that is filled twice.
MAX_UNREAD = 1 << 18


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
    """Events that one watcher has yet to be told. A snapshot comes before them, taken by whoever
    makes the watch."""

    def __init__(self, snapshot: Iterable[StoredBlock]) -> None:
        self.snapshot = list(snapshot)
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
        """Returns what has happened since the last call."""
        self._news.clear()
        events, self._events = self._events, []
        return events

    async def read(self, timeout_s: float) -> list[BlockEvent]:
        """Waits for something to happen, up to `timeout_s`, and returns it."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._news.wait()
        return self.take()
