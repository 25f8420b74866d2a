"""A heap from which any item can be removed, in logarithmic time amortized over the calls of `put`.

An outdated entry stays until it reaches the front or the heap is rebuilt.
"""

from __future__ import annotations

import heapq
from typing import Generic, TypeVar

Key = TypeVar("Key", float, tuple[int, float, float])
Item = TypeVar("Item")

_MIN_ENTRIES = 64  # below which the heap is not rebuilt


class Heap(Generic[Key, Item]):
    """Items in order of their keys, each at most once. Items with equal keys are in order of
    `put`."""

    def __init__(self) -> None:
        self._entries: list[tuple[Key, int, Item]] = []
        self._numbers: dict[Item, int] = {}  # of each item's entry
        self._num_put = 0

    def __len__(self) -> int:
        return len(self._numbers)

    def put(self, item: Item, key: Key) -> None:
        """Adds an item, or changes its key."""
        self._num_put += 1
        self._numbers[item] = self._num_put
        heapq.heappush(self._entries, (key, self._num_put, item))
        if len(self._entries) > max(_MIN_ENTRIES, 2 * len(self._numbers)):
            self._entries = [each for each in self._entries if self._counts(each)]
            heapq.heapify(self._entries)

    def discard(self, item: Item) -> None:
        """Removes an item, if it is there."""
        self._numbers.pop(item, None)

    def peek(self) -> tuple[Key, Item] | None:
        """The smallest key and its item."""
        while self._entries:
            first = self._entries[0]
            if self._counts(first):
                return first[0], first[2]
            heapq.heappop(self._entries)
        return None

    def _counts(self, entry: tuple[Key, int, Item]) -> bool:
        _, number, item = entry
        return self._numbers.get(item) == number
