"""The waiting queue, which decides which sequence is admitted next.

Lower priorities go first. Among equal priorities, the client with the least usage goes next
(`client_usage`). A client that submits thousands of requests, or the longest ones, therefore does
not make another client's requests wait for all of them. Anonymous requests count as their
frontend's. A client's requests go in order of arrival.

Nothing starves, because every `OLDEST_EVERY`-th admission disregards priorities. Clients take turns
at these admissions, so that a flood by one client does not take them from others. All anonymous
requests are one client here. If a client's oldest sequence is anonymous, the turn admits it.
Otherwise the turn admits the next sequence of the oldest one's priority, so that no client gets
more than its share among equals. A sequence admitted in this way gets the best rank, so that it is
preempted last.

An anonymous sequence is admitted after at most `OLDEST_EVERY * c * (n + 1)` admissions if c clients
wait and n older anonymous sequences are in the queue. Short prompts do not count: they may overtake
where they delay no other sequence.
"""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from operator import itemgetter

from scheduler_svc.core.client import ANONYMOUS, Client
from scheduler_svc.core.client_usage import ClientUsage, ClientUsages
from scheduler_svc.core.heap import Heap
from scheduler_svc.core.sequence import Rank, Sequence

OLDEST_EVERY = 8
_FIRST_LEVEL = -(1 << 31) - 1  # below every int32


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
        key = seq.rank.level, usage
        self._queues.setdefault(key, Heap()).put(seq, seq.rank.arrival)
        place, _ = self._first(*key)
        self._order.put(key, place)

    def remove(self, seq: Sequence, usage: ClientUsage) -> None:
        """Removes a sequence that was pushed with this usage."""
        key = seq.rank.level, usage
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

    def peek_at(self, level: int) -> Sequence:
        """The next sequence of a priority that has sequences. Looks at every client that waits."""
        found = (self._first(*key) for key in self._queues if key[0] == level)
        _, seq = min(found, key=itemgetter(0))
        return seq

    def check_integrity(self) -> None:
        """Raises AssertionError if the heaps contradict each other. For tests."""
        assert all(self._queues.values()), "an empty queue"
        assert len(self._queues) == len(self._order), "clients"

    def _first(self, level: int, usage: ClientUsage) -> tuple[tuple[int, float, float], Sequence]:
        """A client's first sequence of a priority, and its place in the order."""
        first = self._queues[level, usage].peek()
        assert first is not None, "an empty queue"
        arrival, seq = first
        return (level, usage.num_tokens, arrival), seq


@dataclass(slots=True)
class _Share:
    """One client's part of the queue."""

    num_tokens: int = 0
    sequences: Heap[float, Sequence] = field(default_factory=Heap)  # by arrival


class WaitingQueue:
    """Waiting sequences. Those of up to `max_short_tokens` tokens can also be found separately."""

    def __init__(self, max_short_tokens: int) -> None:
        self.num_tokens = 0  # of all sequences in the queue
        self.num_uncached_tokens = 0  # how many of these are expected to be computed
        self.only: Seq[Sequence] | None = None  # the ones that may be admitted, in order; None: all
        self.usages = ClientUsages()
        self._max_short_tokens = max_short_tokens
        self._sequences: dict[Sequence, ClientUsage] = {}  # the usage by which each is ordered
        # The usage of sequences that count as preempted, which go ahead of all others.
        self._preempted = ClientUsage(ANONYMOUS)
        self._preempted.num_tokens = -1.0
        self._arrivals = itertools.count()
        self._order, self._short_order = FairOrder(), FairOrder()
        self._shares: OrderedDict[str, _Share] = OrderedDict()  # by client name; next turn first
        self._num_admissions = 0

    def __len__(self) -> int:
        return len(self._sequences)

    def __contains__(self, seq: Sequence) -> bool:
        return seq in self._sequences

    def waiting_of(self, client: Client) -> tuple[int, int]:
        """The number of a client's sequences in the queue, and the number of their tokens."""
        share = self._shares.get(client.name)
        return (len(share.sequences), share.num_tokens) if share else (0, 0)

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
        for order in self._orders_of(seq):
            order.push(seq, usage)
        self.num_tokens += seq.num_tokens
        self.num_uncached_tokens += seq.num_expected_uncached
        share = self._shares.setdefault(seq.request.client.name, _Share())
        share.num_tokens += seq.num_tokens
        share.sequences.put(seq, seq.rank.arrival)

    def peek(self) -> Sequence | None:
        """The next sequence to admit, or None. It stays the same until it is admitted, another
        sequence arrives, or its client's usage exceeds another client's."""
        if self.only is not None:
            return next((seq for seq in self.only if seq in self), None)
        return self._next_of_turn() if self._is_turn else self._order.peek()

    def peek_short(self) -> Sequence | None:
        """The next of the short sequences, or None."""
        return self._short_order.peek() if self.only is None else None

    def may_overtake(self, seq: Sequence, first: Sequence) -> bool:
        """Whether a short sequence may go before `first`, the next in line. Its client's head start
        must not grow beyond one short prompt's tokens. Anonymous sequences always may."""
        usage, other = seq.usage, first.usage
        if not seq.request.client.name or usage is other:
            return True
        if seq.request.priority != first.request.priority:
            return seq.request.priority < first.request.priority
        return usage.num_tokens <= other.num_tokens + self._max_short_tokens

    def admit(self, seq: Sequence) -> None:
        """Removes a sequence that `peek` or `peek_short` returned, and charges its client for the
        tokens that are to be computed."""
        is_next = self.only is None and seq is self.peek()
        is_first = seq is self._order.peek()
        if self._sequences[seq] is not self._preempted:
            seq.usage.add_input(seq.num_tokens - seq.num_computed_tokens)
        if is_next and self._is_turn:
            self._shares.move_to_end(next(iter(self._shares)))
        self.remove(seq)
        self._num_admissions += is_next
        if is_next and not is_first:
            seq.rank = seq.rank._replace(level=_FIRST_LEVEL)

    def remove(self, seq: Sequence) -> None:
        """Removes any sequence in the queue."""
        usage = self._sequences.pop(seq)
        if usage is not self._preempted:
            self.usages.leave(usage)
        for order in self._orders_of(seq):
            order.remove(seq, usage)
        self.num_tokens -= seq.num_tokens
        self.num_uncached_tokens -= seq.num_expected_uncached
        name = seq.request.client.name
        share = self._shares[name]
        share.num_tokens -= seq.num_tokens
        share.sequences.discard(seq)
        if not share.sequences:
            del self._shares[name]

    def check_integrity(self) -> None:
        """Raises AssertionError if the counts contradict the sequences. For tests."""
        assert self.num_tokens == sum(s.num_tokens for s in self._sequences), "waiting tokens"
        uncached = sum(s.num_expected_uncached for s in self._sequences)
        assert self.num_uncached_tokens == uncached, "uncached tokens"
        lengths = {name: len(share.sequences) for name, share in self._shares.items()}
        assert lengths == Counter(s.request.client.name for s in self._sequences), "shares"
        shares = self._shares.values()
        assert sum(share.num_tokens for share in shares) == self.num_tokens, "clients' tokens"
        waiting = Counter(u for u in self._sequences.values() if u is not self._preempted)
        assert all(usage.num_waiting == n for usage, n in waiting.items()), "usages"
        self._order.check_integrity()
        self._short_order.check_integrity()

    @property
    def _is_turn(self) -> bool:
        """Whether the next admission is a client's turn, whatever the priorities."""
        return self._num_admissions % OLDEST_EVERY == OLDEST_EVERY - 1

    def _next_of_turn(self) -> Sequence | None:
        """The sequence to admit for the client whose turn is next, or None."""
        for name, share in self._shares.items():
            oldest = share.sequences.peek()
            assert oldest is not None, "an empty share"
            _, seq = oldest
            return self._order.peek_at(seq.rank.level) if name else seq
        return None

    def _orders_of(self, seq: Sequence) -> tuple[FairOrder, ...]:
        is_short = seq.num_tokens <= self._max_short_tokens
        return (self._order, self._short_order) if is_short else (self._order,)
