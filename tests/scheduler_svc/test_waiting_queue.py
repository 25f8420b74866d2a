from __future__ import annotations

import random

from scheduler_svc.core.heap import Heap
from scheduler_svc.core.sampling import SamplingParams
from scheduler_svc.core.sequence import Request, Sequence
from scheduler_svc.core.waiting_queue import WaitingQueue


def make(connection: int, number: int, priority: int = 0, length: int = 1) -> Sequence:
    return Sequence(
        (connection, number), [0] * length, SamplingParams(5), Request(priority=priority)
    )


def admit(queue: WaitingQueue) -> tuple[int, int]:
    seq = queue.peek()
    assert seq is not None
    assert queue.peek() is seq
    queue.admit(seq)
    queue.check_integrity()
    return seq.key


def admit_all(queue: WaitingQueue) -> list[tuple[int, int]]:
    return [admit(queue) for _ in range(len(queue))]


def test_frontends_take_turns() -> None:
    queue = WaitingQueue(8)
    for number in range(6):
        queue.push(make(1, number))
    queue.push(make(2, 0))
    queue.push(make(2, 1))
    assert [admit(queue) for _ in range(3)] == [(1, 0), (2, 0), (1, 1)]
    queue.push(make(3, 0))  # a newcomer gets the next turn, not the turns it missed
    queue.push(make(3, 1))
    assert [admit(queue) for _ in range(3)] == [(2, 1), (3, 0), (1, 2)]
    assert [admit(queue) for _ in range(2)] == [(3, 1), (1, 3)]


def test_a_frontend_that_withdraws_its_requests_does_not_pay_for_them() -> None:
    queue = WaitingQueue(8)
    gone = [make(1, number) for number in range(100)]
    for seq in gone:
        queue.push(seq)
    for seq in gone:
        queue.remove(seq)
    queue.push(make(2, 0))
    queue.push(make(1, 100))
    queue.push(make(2, 1))
    assert admit_all(queue) == [(2, 0), (1, 100), (2, 1)]


def test_nothing_starves_among_equal_priorities() -> None:
    """However many requests of other frontends keep coming, new frontends among them."""
    queue = WaitingQueue(8)
    late = make(0, 0)
    for number in range(3):
        queue.push(make(1, number))
    queue.push(late)
    for number in range(10, 20):
        queue.push(make(1, number))
        queue.push(make(number, 0))
        if admit(queue) == late.key:
            break
    assert late not in queue


def test_a_higher_number_waits_while_lower_ones_keep_coming() -> None:
    queue = WaitingQueue(8)
    late = make(0, 0, priority=1)
    queue.push(late)
    for number in range(100):
        queue.push(make(1, number))
        assert admit(queue) == (1, number)
    assert admit(queue) == late.key


def test_preempted_sequences_go_before_new_ones_of_their_priority() -> None:
    queue = WaitingQueue(8)
    first, second = make(0, 0), make(0, 1)
    queue.push(first)
    queue.push(second)
    assert admit_all(queue) == [(0, 0), (0, 1)]
    queue.push(make(0, 2))
    queue.push(make(1, 0))
    queue.push(make(1, 1, priority=-1))
    queue.push(second)
    queue.push(first)
    assert admit_all(queue) == [(1, 1), (0, 0), (0, 1), (0, 2), (1, 0)]


def test_random_operations_agree_with_a_sorted_list(seed: int) -> None:
    rng = random.Random(seed)
    queue = WaitingQueue(4)
    waiting: list[Sequence] = []
    for number in range(2000):
        if rng.random() < 0.55:
            waiting.append(make(0, number, rng.randint(-2, 2), rng.randint(1, 8)))
            queue.push(waiting[-1])
        elif waiting:
            seq = rng.choice(waiting) if rng.random() < 0.5 else queue.peek()
            assert seq
            waiting.remove(seq)
            queue.remove(seq)
        queue.check_integrity()
        expected = min(waiting, key=lambda s: s.rank, default=None)
        assert queue.peek() is expected
        assert queue.num_tokens == sum(s.num_tokens for s in waiting)
        short = [s for s in waiting if s.num_tokens <= 4]
        expected = min(short, key=lambda s: s.rank, default=None)
        assert queue.peek_short() is expected


def test_a_heap_lets_go_of_what_has_been_removed() -> None:
    heap: Heap[float, int] = Heap()
    heap.put(-1, 0.0)
    for number in range(10_000):
        heap.put(number, 1.0)
        heap.discard(number)
        heap.put(-1, -float(number))
        assert len(heap._entries) <= 65
    assert heap.peek() == (-9999.0, -1)
    heap.discard(-1)
    assert heap.peek() is None
    assert not heap
    assert not heap._entries
