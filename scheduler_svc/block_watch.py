"""Events that tell watchers which blocks the prefix cache stores and removes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

# Maximum of unread events of a watch: those of a large cache that is filled twice.
MAX_UNREAD = 1 << 18
# Maximum of watches of a cache. Watchers are frontends that choose among engines, and operators.
MAX_WATCHES = 16
_MAX_CHAIN = 512  # blocks that are visited to yield one block


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


class Snapshot:
    """The blocks stored at one time. Blocks stored or removed later do not change the snapshot.
    Iterating consumes it, with a bounded amount of work per block."""

    def __init__(self, contents: dict[bytes, StoredBlock]) -> None:
        self._left = contents.copy()

    def __len__(self) -> int:
        return len(self._left)

    def __iter__(self) -> Iterator[StoredBlock]:
        """Yields each block after its parent, if the parent is stored. The exception is a chain
        longer than `_MAX_CHAIN` in which each block was stored before its parent."""
        for first in list(self._left):
            name: bytes | None = first
            chain: list[StoredBlock] = []
            while name and name in self._left and len(chain) < _MAX_CHAIN:
                chain.append(self._left.pop(name))
                name = chain[-1].parent
            yield from reversed(chain)


class BlockWatch:
    """A snapshot for one watcher, and the later events that the watcher has not read."""

    def __init__(self, contents: dict[bytes, StoredBlock]) -> None:
        self.snapshot = Snapshot(contents)
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
