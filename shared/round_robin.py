"""Waiting items, taken in turn among their owners (Nagle, RFC 970), each owner's oldest first.
However many items the other owners have, an owner waits for only one item of each at a time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

Owner = TypeVar("Owner", bound=Hashable)
Item = TypeVar("Item", bound=Hashable)


class RoundRobin(Generic[Owner, Item]):
    """A queue of items for each owner; an owner's equal items count as one.

    `heads` and `clear` take linear time, the other methods constant time.
    """

    def __init__(self) -> None:
        # By owner, the next owner first. No queue is empty.
        self._queues: OrderedDict[Owner, OrderedDict[Item, None]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._queues)

    def add(self, owner: Owner, item: Item) -> None:
        self._queues.setdefault(owner, OrderedDict())[item] = None

    def remove(self, owner: Owner, item: Item) -> None:
        """Removes an item, if it is in the queue."""
        queue = self._queues.get(owner)
        if queue is not None:
            queue.pop(item, None)
            if not queue:
                del self._queues[owner]

    def heads(self) -> Iterator[tuple[Owner, Item]]:
        """Yields each owner and its oldest item, the next owner first."""
        for owner, queue in self._queues.items():
            yield owner, next(iter(queue))

    def pop(self) -> Item:
        """Removes and returns the next owner's oldest item."""
        return self.pop_of(next(iter(self._queues)))

    def pop_of(self, owner: Owner) -> Item:
        """Removes and returns this owner's oldest item; the owner then comes after the others."""
        queue = self._queues[owner]
        item, _ = queue.popitem(last=False)
        if queue:
            self._queues.move_to_end(owner)
        else:
            del self._queues[owner]
        return item

    def clear(self) -> list[Item]:
        """Removes and returns all items."""
        items = [item for queue in self._queues.values() for item in queue]
        self._queues.clear()
        return items
