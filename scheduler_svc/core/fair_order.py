"""The order in which waiting sequences go: by priority, then by what their line has had so far,
then by arrival."""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Callable
from itertools import count

from scheduler_svc.core.lazy_heap import LazyHeap
from scheduler_svc.core.lines import Line
from scheduler_svc.core.sequence import Sequence

Place = tuple[float, int]  # what the line has had, arrival
_AHEAD_OF_ALL = -1.0  # where no line has had less than 0


class _Queue:
    """The sequences of one line and priority, or, without a line, the preempted ones of a priority.
    They go in order of arrival."""

    __slots__ = ("length", "line", "place", "sequences", "ticket")

    def __init__(self, line: Line | None, holds: Callable[[Sequence, int], bool]) -> None:
        self.line = line
        self.sequences: LazyHeap[float, Sequence] = LazyHeap(holds)
        self.length = 0
        self.place: Place | None = None  # as it was last entered in the order
        self.ticket = -1  # of that entry

    def place_of(self, head: Sequence) -> Place:
        served = _AHEAD_OF_ALL if self.line is None else self.line.served
        return served, head.rank.arrival


class _Level:
    """The queues of one priority."""

    __slots__ = ("num_queues", "order")

    def __init__(self) -> None:
        self.num_queues = 0
        self.order: LazyHeap[Place, _Queue] = LazyHeap(lambda queue, t: queue.ticket == t)


class FairOrder:
    """Sequences of which the next one can be found. What lines have had only grows, so a queue's
    place in the order is brought up to date when it comes to the front: charging a line costs
    nothing here.

    Args:
        holds: whether a sequence still waits with the ticket that it was pushed with.
    """

    def __init__(self, holds: Callable[[Sequence, int], bool]) -> None:
        self._holds = holds
        self._queues: dict[tuple[int, Line | None], _Queue] = {}
        self._levels: dict[int, _Level] = {}
        self._priorities: list[int] = []  # ascending
        self._tickets = count()

    def push(self, seq: Sequence, ticket: int, line: Line | None) -> None:
        """Adds a sequence; without a line it goes ahead of all of its priority that have one."""
        priority, arrival = seq.rank
        key = priority, line
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = _Queue(line, self._holds)
            if priority not in self._levels:
                self._levels[priority] = _Level()
                insort(self._priorities, priority)
            self._levels[priority].num_queues += 1
        queue.sequences.push(arrival, ticket, seq)
        queue.length += 1
        self._update(self._levels[priority], queue)

    def remove(self, seq: Sequence, line: Line | None) -> None:
        """Takes out a sequence that was pushed with this line, and no longer holds its ticket."""
        priority = seq.rank.priority
        key = priority, line
        queue = self._queues[key]
        queue.length -= 1
        if queue.length:
            return
        queue.ticket = -1
        del self._queues[key]
        level = self._levels[priority]
        level.num_queues -= 1
        if not level.num_queues:
            del self._levels[priority]
            self._priorities.remove(priority)

    def peek(self) -> Sequence | None:
        """The next sequence."""
        return self.peek_at(self._priorities[0]) if self._priorities else None

    def peek_at(self, priority: int) -> Sequence:
        """The next sequence of those of one priority, of which there is one."""
        level = self._levels[priority]
        while first := level.order.peek():
            place, queue = first
            head = self._update(level, queue)
            if queue.place == place:
                return head
        raise AssertionError("a priority without sequences")

    def check_integrity(self) -> None:
        """Raises AssertionError if a queue has no place. For tests."""
        for queue in self._queues.values():
            assert queue.length > 0, "an empty queue"
            assert queue.ticket >= 0, "a queue without a place"
        lengths = Counter(priority for priority, _ in self._queues)
        assert lengths == {p: level.num_queues for p, level in self._levels.items()}, "levels"
        assert self._priorities == sorted(self._levels), "priorities"

    def _update(self, level: _Level, queue: _Queue) -> Sequence:
        """Gives a queue its present place in the order, and returns its head."""
        first = queue.sequences.peek()
        assert first is not None, "an empty queue"
        place = queue.place_of(first[1])
        if place != queue.place:
            queue.place, queue.ticket = place, next(self._tickets)
            level.order.push(place, queue.ticket, queue)
        return first[1]
