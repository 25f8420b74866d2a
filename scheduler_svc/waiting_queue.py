"""The waiting queue, which decides what is admitted next.

Lower priorities go first. Among equal ones the frontends alternate, so that one that submits
thousands does not make another's requests wait for all of them (fair queueing after Nagle, RFC 970,
by start tags as in Goyal et al., "Start-time Fair Queueing"). A frontend's requests go in order
of arrival.

Nothing starves: every `OLDEST_EVERY`-th admission goes to the sequence that arrived first, whatever
its priority and frontend. With n sequences in the queue that arrived before it, a sequence is
admitted after at most `OLDEST_EVERY * (n + 1)` admissions, not counting short prompts, which may
overtake where they delay nobody. It keeps what it got that way: from then on nothing has a better
priority, so that it is preempted last.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from scheduler_svc.lazy_heap import LazyHeap
from scheduler_svc.sequence import Sequence

OLDEST_EVERY = 8
_FIRST_OF_ALL = -(1 << 31) - 1  # below every int32


@dataclass
class _Line:
    """One frontend's sequences of one priority."""

    length: int = 0
    last_tag: int = -1


@dataclass
class _Level:
    """The sequences of one priority."""

    length: int = 0
    virtual_time: int = 0  # the largest start tag of those that were admitted
    lines: dict[int, _Line] = field(default_factory=dict)


class WaitingQueue:
    """Waiting sequences, of which those of up to `max_short_tokens` tokens can be found apart."""

    def __init__(self, max_short_tokens: int) -> None:
        self.num_tokens = 0  # of all sequences in the queue
        self.only: Seq[Sequence] | None = None  # these may be admitted, in this order; None: all
        self._max_short_tokens = max_short_tokens
        self._tickets: dict[Sequence, int] = {}  # of the sequences in the queue
        self._start_tags: dict[Sequence, int] = {}  # likewise
        self._numbers = itertools.count()
        self._arrivals = itertools.count()
        self._ordered: LazyHeap[tuple[int, int, int]] = LazyHeap(self._holds)
        self._ordered_short: LazyHeap[tuple[int, int, int]] = LazyHeap(self._holds)
        self._oldest: LazyHeap[float] = LazyHeap(self._holds)
        self._levels: dict[int, _Level] = {}
        self._num_admissions = 0

    def __len__(self) -> int:
        return len(self._tickets)

    def __contains__(self, seq: Sequence) -> bool:
        return seq in self._tickets

    def arrive(self, seq: Sequence) -> None:
        """Gives a new sequence its place among the others without queueing it. When it is queued
        later, it counts as preempted."""
        seq.arrival_number = next(self._arrivals)

    def push(self, seq: Sequence) -> None:
        """Queues a new sequence, or a preempted one, which goes ahead of the new ones."""
        level = self._levels.setdefault(seq.priority, _Level())
        line = level.lines.setdefault(seq.key.connection, _Line())
        if seq.arrival_number < 0:
            self.arrive(seq)
            tag = line.last_tag = max(level.virtual_time, line.last_tag + 1)
        else:
            tag = -1
        level.length += 1
        line.length += 1
        self.num_tokens += seq.num_tokens
        ticket = self._tickets[seq] = next(self._numbers)
        self._start_tags[seq] = tag
        key = (seq.priority, tag, seq.arrival_number)
        self._ordered.push(key, ticket, seq)
        if seq.num_tokens <= self._max_short_tokens:
            self._ordered_short.push(key, ticket, seq)
        self._oldest.push(seq.arrival_number, ticket, seq)

    def peek(self) -> Sequence | None:
        """The next sequence to admit. It stays the same until admitted, or until a better one
        comes."""
        if self.only is not None:
            return next((seq for seq in self.only if seq in self), None)
        if self._num_admissions % OLDEST_EVERY == OLDEST_EVERY - 1:
            return _sequence(self._oldest)
        return _sequence(self._ordered)

    def peek_short(self) -> Sequence | None:
        """The next of the short sequences."""
        if self.only is not None:
            return None
        return _sequence(self._ordered_short)

    def admit(self, seq: Sequence) -> None:
        """Takes out a sequence that `peek` or `peek_short` returned."""
        is_next = self.only is None and seq is self.peek()
        is_first = seq is _sequence(self._ordered)
        level = self._levels[seq.priority]
        level.virtual_time = max(level.virtual_time, self._start_tags[seq])
        self.remove(seq)
        self._num_admissions += is_next
        if is_next and not is_first:
            seq.priority = _FIRST_OF_ALL

    def remove(self, seq: Sequence) -> None:
        """Takes out any sequence in the queue."""
        del self._tickets[seq], self._start_tags[seq]
        self.num_tokens -= seq.num_tokens
        level = self._levels[seq.priority]
        line = level.lines[seq.key.connection]
        level.length -= 1
        line.length -= 1
        if not line.length:
            del level.lines[seq.key.connection]
        if not level.length:
            del self._levels[seq.priority]

    def check_integrity(self) -> None:
        """Raises AssertionError if the counts contradict the sequences. For tests."""
        assert self.num_tokens == sum(s.num_tokens for s in self._tickets), "waiting tokens"
        assert sum(level.length for level in self._levels.values()) == len(self), "levels"
        for level in self._levels.values():
            assert sum(line.length for line in level.lines.values()) == level.length, "lines"

    def _holds(self, seq: Sequence, ticket: int) -> bool:
        return self._tickets.get(seq) == ticket


def _sequence(heap: LazyHeap[float] | LazyHeap[tuple[int, int, int]]) -> Sequence | None:
    first = heap.peek()
    return first[1] if first else None
