"""A heap that discards outdated entries lazily."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Generic, TypeVar

Key = TypeVar("Key", float, tuple[float, int])
Item = TypeVar("Item")

_MIN_COMPACTION = 64


class LazyHeap(Generic[Key, Item]):
    """A heap from which entries need not be removed: those for which `is_current(item, ticket)`
    no longer holds are skipped at the front, and swept out whenever the heap has doubled. Every
    operation takes logarithmic time, amortised over the pushes."""

    def __init__(self, is_current: Callable[[Item, int], bool]) -> None:
        self._is_current = is_current
        self._entries: list[tuple[Key, int, Item]] = []
        self._compact_at = _MIN_COMPACTION

    def __len__(self) -> int:
        """Counts outdated entries, too."""
        return len(self._entries)

    def push(self, key: Key, ticket: int, item: Item) -> None:
        """Adds an entry. Tickets are unique and break ties between equal keys."""
        if len(self._entries) >= self._compact_at:
            self._entries = [e for e in self._entries if self._is_current(e[2], e[1])]
            heapq.heapify(self._entries)
            self._compact_at = max(_MIN_COMPACTION, 2 * len(self._entries))
        heapq.heappush(self._entries, (key, ticket, item))

    def peek(self) -> tuple[Key, Item] | None:
        """The current entry with the smallest key."""
        while self._entries:
            key, ticket, item = self._entries[0]
            if self._is_current(item, ticket):
                return key, item
            heapq.heappop(self._entries)
        return None
