"""The waiting queue, which decides what is admitted next.

Lower priorities go first. Among equal ones the client that has had least of the machine goes next
(`lines`), so that one that submits thousands, or the longest, does not make another's requests wait
for all of them. Anonymous requests count as their frontend's. A client's requests go in order of
arrival.

Nothing starves: every `OLDEST_EVERY`-th admission disregards priorities. The clients take turns
with these, so that a flood by one does not take them from others; all anonymous requests are one
client here. It goes to the client's oldest sequence, if that is anonymous, else to whichever is
next of those with the same priority as that one, so that a turn brings nobody more than its share
among equals. With n anonymous sequences in the queue that arrived before it, and c clients that
wait, an anonymous one is admitted after at most `OLDEST_EVERY * c * (n + 1)` admissions, not
counting short prompts, which may overtake where they delay nobody. A sequence keeps what it got
that way: from then on nothing has a better priority, so that it is preempted last.
"""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Seq

from scheduler_svc.core.client import Client
from scheduler_svc.core.fair_order import FairOrder
from scheduler_svc.core.lazy_heap import LazyHeap
from scheduler_svc.core.lines import Line, Lines
from scheduler_svc.core.sequence import Rank, Sequence

OLDEST_EVERY = 8
_FIRST_OF_ALL = -(1 << 31) - 1  # below every int32


class _Share:
    """One client's part of the queue."""

    __slots__ = ("length", "num_tokens", "oldest")

    def __init__(self, oldest: LazyHeap[float, Sequence]) -> None:
        self.length = 0
        self.num_tokens = 0
        self.oldest = oldest


class WaitingQueue:
    """Waiting sequences, of which those of up to `max_short_tokens` tokens can be found apart."""

    def __init__(self, max_short_tokens: int) -> None:
        self.num_tokens = 0  # of all sequences in the queue
        self.num_uncached_tokens = 0  # of those, the ones that are expected to be computed
        self.only: Seq[Sequence] | None = None  # these may be admitted, in this order; None: all
        self._max_short_tokens = max_short_tokens
        self._lines = Lines()
        self._tickets: dict[Sequence, int] = {}  # of the sequences in the queue
        self._preempted: set[Sequence] = set()  # of those, the ones that have had a turn already
        self._numbers = itertools.count()
        self._arrivals = itertools.count()
        self._ordered = FairOrder(self._holds)
        self._ordered_short = FairOrder(self._holds)
        self._shares: OrderedDict[str, _Share] = OrderedDict()  # by name; whose turn is next first
        self._num_admissions = 0

    def __len__(self) -> int:
        return len(self._tickets)

    def __contains__(self, seq: Sequence) -> bool:
        return seq in self._tickets

    @property
    def num_lines(self) -> int:
        """Lines that compete, or may: what a single one has had need not be counted."""
        return len(self._lines)

    @property
    def num_clients(self) -> int:
        """Clients with open sequences, whether they wait or not; anonymous ones are one."""
        return self._lines.num_clients

    def waiting_of(self, client: Client) -> tuple[int, int]:
        """The number of a client's sequences in the queue, and of their tokens."""
        share = self._shares.get(client.name)
        return (share.length, share.num_tokens) if share else (0, 0)

    def arrive(self, seq: Sequence) -> None:
        """Gives a new sequence its place among the others without queueing it. When it is queued
        later, it counts as preempted."""
        request = seq.request
        seq.rank = Rank(request.priority, next(self._arrivals))
        seq.line = self._lines.line_of(request.client, seq.key.connection, request.priority)

    def open(self, seq: Sequence) -> None:
        """Notes that a sequence that has arrived, or a beam of it, may wait until `close`."""
        self._lines.open(seq.line)

    def close(self, seq: Sequence) -> None:
        """Notes that a sequence, which is not in the queue, has ended."""
        self._lines.close(seq.line)

    def push(self, seq: Sequence) -> None:
        """Queues a new sequence, or a preempted one, which goes ahead of the new ones."""
        if seq.queued:
            self._preempted.add(seq)
        else:
            self.arrive(seq)
            seq.line.join()
        self.num_tokens += seq.num_tokens
        self.num_uncached_tokens += seq.num_expected_uncached
        ticket = self._tickets[seq] = next(self._numbers)
        line = self._queued_line(seq)
        self._ordered.push(seq, ticket, line)
        if seq.num_tokens <= self._max_short_tokens:
            self._ordered_short.push(seq, ticket, line)
        share = self._shares.get(seq.request.client.name)
        if share is None:
            share = self._shares[seq.request.client.name] = _Share(LazyHeap(self._holds))
        share.length += 1
        share.num_tokens += seq.num_tokens
        share.oldest.push(seq.rank.arrival, ticket, seq)

    def peek(self) -> Sequence | None:
        """The next sequence to admit. It stays the same until admitted, until another comes, or
        until its client has had more than another."""
        if self.only is not None:
            return next((seq for seq in self.only if seq in self), None)
        return self._next_of_its_client() if self._is_clients_turn else self._ordered.peek()

    def peek_short(self) -> Sequence | None:
        """The next of the short sequences."""
        if self.only is not None:
            return None
        return self._ordered_short.peek()

    def may_overtake(self, seq: Sequence, first: Sequence) -> bool:
        """Whether a short sequence may go before the next in line without a head start for its
        client that grows: beyond one short prompt's tokens it goes in order. Anonymous ones may."""
        line, other = seq.line, first.line
        if not seq.request.client.name or line is other:
            return True
        if line.level is not other.level:
            return line.level.priority < other.level.priority
        return line.served <= other.served + self._max_short_tokens

    def admit(self, seq: Sequence) -> None:
        """Takes out a sequence that `peek` or `peek_short` returned, and charges its client for the
        tokens that are to be computed."""
        is_next = self.only is None and seq is self.peek()
        is_first = seq is self._ordered.peek()
        if seq not in self._preempted:
            seq.line.add_input(seq.num_tokens - seq.num_computed_tokens)
        if is_next and self._is_clients_turn:
            self._shares.move_to_end(next(iter(self._shares)))
        self.remove(seq)
        self._num_admissions += is_next
        if is_next and not is_first:
            seq.rank = seq.rank._replace(priority=_FIRST_OF_ALL)

    def remove(self, seq: Sequence) -> None:
        """Takes out any sequence in the queue."""
        del self._tickets[seq]
        line = self._queued_line(seq)
        self._ordered.remove(seq, line)
        if seq.num_tokens <= self._max_short_tokens:
            self._ordered_short.remove(seq, line)
        if line is None:
            self._preempted.remove(seq)
        else:
            line.leave()
        self.num_tokens -= seq.num_tokens
        self.num_uncached_tokens -= seq.num_expected_uncached
        share = self._shares[seq.request.client.name]
        share.length -= 1
        share.num_tokens -= seq.num_tokens
        if not share.length:
            del self._shares[seq.request.client.name]

    def check_integrity(self, open_sequences: Iterable[Sequence] | None = None) -> None:
        """Raises AssertionError if the counts contradict the sequences. For tests."""
        if open_sequences is not None:
            self._lines.check_integrity(seq.line for seq in open_sequences)
        assert self.num_tokens == sum(s.num_tokens for s in self._tickets), "waiting tokens"
        uncached = sum(s.num_expected_uncached for s in self._tickets)
        assert self.num_uncached_tokens == uncached, "uncached tokens"
        lengths = {name: share.length for name, share in self._shares.items()}
        assert lengths == Counter(s.request.client.name for s in self._tickets), "clients' shares"
        shares = self._shares.values()
        assert sum(share.num_tokens for share in shares) == self.num_tokens, "clients' tokens"
        assert self._preempted <= self._tickets.keys(), "preempted, but not waiting"
        waiting = Counter(s.line for s in self._tickets if s not in self._preempted)
        assert all(line.num_waiting == n for line, n in waiting.items()), "lines"
        self._ordered.check_integrity()
        self._ordered_short.check_integrity()

    @property
    def _is_clients_turn(self) -> bool:
        return self._num_admissions % OLDEST_EVERY == OLDEST_EVERY - 1

    def _next_of_its_client(self) -> Sequence | None:
        """The sequence that goes where it is a client's turn."""
        for name, share in self._shares.items():
            first = share.oldest.peek()
            assert first is not None, "an empty share"
            return self._ordered.peek_at(first[1].rank.priority) if name else first[1]
        return None

    def _queued_line(self, seq: Sequence) -> Line | None:
        """The line that a sequence in the queue waits in; None if it was preempted."""
        return None if seq in self._preempted else seq.line

    def _holds(self, seq: Sequence, ticket: int) -> bool:
        return self._tickets.get(seq) == ticket
