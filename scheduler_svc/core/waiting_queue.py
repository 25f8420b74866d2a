"""The waiting queue, which decides which sequence is admitted next.

Lower priorities go first. Among equal priorities, the client with the least usage goes next
(`client_usage`). A client that submits thousands of requests, or the longest ones, therefore does
not make another client's requests wait for all of them. Anonymous requests count as their
frontend's. A client's requests go in order of arrival.

A sequence waits as long as others of lower priorities keep coming. Among equal priorities nothing
starves: each admission adds to a client's usage, so that its turn passes to the others.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence as Seq

from scheduler_svc.core.client import ANONYMOUS, Client
from scheduler_svc.core.client_usage import ClientUsage, ClientUsages
from scheduler_svc.core.heap import Heap
from scheduler_svc.core.sequence import Rank, Sequence


class FairOrder:
    """Sequences by priority, then by their client's usage, then by arrival. Usage only grows, so a
    client's place is updated when it reaches the front. Charging a client therefore costs nothing
    here."""

    def __init__(self) -> None:
        # By priority and client: sequences by arrival.
        self._queues: dict[tuple[int, ClientUsage], Heap[float, Sequence]] = {}
        self._order: Heap[tuple[int, float, float], tuple[int, ClientUsage]] = Heap()

    def push(self, seq: Sequence, usage: ClientUsage) -> None:
        """Adds a sequence at the place of the client with this usage."""
        key = seq.rank.priority, usage
        self._queues.setdefault(key, Heap()).put(seq, seq.rank.arrival)
        place, _ = self._first(*key)
        self._order.put(key, place)

    def remove(self, seq: Sequence, usage: ClientUsage) -> None:
        """Removes a sequence that was pushed with this usage."""
        key = seq.rank.priority, usage
        self._queues[key].discard(seq)
        if not self._queues[key]:
            del self._queues[key]
            self._order.discard(key)

    def peek(self) -> Sequence | None:
        """The next sequence, or None."""
        while first := self._order.peek():
            known, key = first
            place, seq = self._first(*key)
            if place == known:
                return seq
            self._order.put(key, place)
        return None

    def check_integrity(self) -> None:
        """Raises AssertionError if the heaps contradict each other. For tests."""
        assert all(self._queues.values()), "an empty queue"
        assert len(self._queues) == len(self._order), "clients"

    def _first(
        self, priority: int, usage: ClientUsage
    ) -> tuple[tuple[int, float, float], Sequence]:
        """A client's first sequence of a priority, and its place in the order."""
        first = self._queues[priority, usage].peek()
        assert first is not None, "an empty queue"
        arrival, seq = first
        return (priority, usage.num_tokens, arrival), seq


class WaitingQueue:
    """Waiting sequences. Those of up to `max_short_tokens` tokens can also be found separately."""

    def __init__(self, max_short_tokens: int) -> None:
        self.num_tokens = 0  # of all sequences in the queue
        self.num_uncached_tokens = 0  # how many of these are expected to be computed
        self.only: Seq[Sequence] | None = None  # the ones that may be admitted, in order; None: all
        self.usages = ClientUsages()
        self._max_short_tokens = max_short_tokens
        self._sequences: dict[Sequence, ClientUsage] = {}  # the usage by which each is ordered
        self._num_of: Counter[ClientUsage] = Counter()  # sequences of each client; no zeros
        # The usage of sequences that count as preempted, which go ahead of all others.
        self._preempted = ClientUsage(ANONYMOUS)
        self._preempted.num_tokens = -1.0
        self._arrivals = itertools.count()
        self._order, self._short_order = FairOrder(), FairOrder()

    def __len__(self) -> int:
        return len(self._sequences)

    def __contains__(self, seq: Sequence) -> bool:
        return seq in self._sequences

    def has_any_of(self, client: Client, connection: int) -> bool:
        """Whether a sequence from `client` on `connection` is in the queue."""
        return self.usages.get(client, connection) in self._num_of

    def arrive(self, seq: Sequence) -> None:
        """Gives a new sequence a rank and a usage without queueing it. When it is queued later, it
        counts as preempted."""
        request = seq.request
        seq.rank = Rank(request.priority, next(self._arrivals))
        seq.usage = self.usages.of(request.client, seq.key.connection)

    def push(self, seq: Sequence) -> None:
        """Queues a new sequence, or a preempted one, which goes ahead of the new ones."""
        usage = self._preempted
        if not seq.queued:
            self.arrive(seq)
            self.usages.join(seq.usage)
            usage = seq.usage
        self._sequences[seq] = usage
        self._num_of[seq.usage] += 1
        for order in self._orders_of(seq):
            order.push(seq, usage)
        self.num_tokens += seq.num_tokens
        self.num_uncached_tokens += seq.num_expected_uncached

    def peek(self) -> Sequence | None:
        """The next sequence to admit, or None. It stays the same until it is admitted, another
        sequence arrives, or its client's usage exceeds another client's."""
        if self.only is not None:
            return next((seq for seq in self.only if seq in self), None)
        return self._order.peek()

    def peek_short(self) -> Sequence | None:
        """The next of the short sequences, or None."""
        return self._short_order.peek() if self.only is None else None

    def may_overtake(self, seq: Sequence, first: Sequence) -> bool:
        """Whether a short sequence may go before `first`, the next in line. It must be of equal
        priority, and the head start of a client with a name must not grow beyond one short prompt's
        tokens."""
        if seq.rank.priority != first.rank.priority:
            return False
        head_start = seq.usage.num_tokens - first.usage.num_tokens
        return not seq.request.client.name or head_start <= self._max_short_tokens

    def admit(self, seq: Sequence) -> None:
        """Removes a sequence that `peek` or `peek_short` returned, and charges its client for the
        tokens that are to be computed."""
        if self._sequences[seq] is not self._preempted:
            seq.usage.add_input(seq.num_tokens - seq.num_computed_tokens)
        self.remove(seq)

    def remove(self, seq: Sequence) -> None:
        """Removes any sequence in the queue."""
        usage = self._sequences.pop(seq)
        if usage is not self._preempted:
            self.usages.leave(usage)
        self._num_of[seq.usage] -= 1
        if not self._num_of[seq.usage]:
            del self._num_of[seq.usage]
        for order in self._orders_of(seq):
            order.remove(seq, usage)
        self.num_tokens -= seq.num_tokens
        self.num_uncached_tokens -= seq.num_expected_uncached

    def check_integrity(self) -> None:
        """Raises AssertionError if the counts contradict the sequences. For tests."""
        assert self.num_tokens == sum(s.num_tokens for s in self._sequences), "waiting tokens"
        uncached = sum(s.num_expected_uncached for s in self._sequences)
        assert self.num_uncached_tokens == uncached, "uncached tokens"
        waiting = Counter(u for u in self._sequences.values() if u is not self._preempted)
        assert all(usage.num_waiting == n for usage, n in waiting.items()), "usages"
        assert self._num_of == Counter(seq.usage for seq in self._sequences), "clients"
        self._order.check_integrity()
        self._short_order.check_integrity()

    def _orders_of(self, seq: Sequence) -> tuple[FairOrder, ...]:
        is_short = seq.num_tokens <= self._max_short_tokens
        return (self._order, self._short_order) if is_short else (self._order,)
