"""Clients with names: who goes next, however much others send."""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import replace
from itertools import count

import hypothesis
import pytest
from hypothesis import strategies as st

from scheduler_svc.core.client import ANONYMOUS, Client
from scheduler_svc.core.sampling import SamplingParams
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import FinishCause, Request, Sequence
from scheduler_svc.core.step import End
from scheduler_svc.core.waiting_queue import OLDEST_EVERY, WaitingQueue
from tests.scheduler_svc import schedulers
from tests.scheduler_svc.schedulers import answered

A, B, C = Client("a"), Client("b"), Client("c")
_numbers = count(1)


def make(
    client: Client,
    length: int = 1,
    max_tokens: int = 50,
    priority: int = 0,
    connection: int = 0,
) -> Sequence:
    number = next(_numbers)
    return Sequence(
        (connection, number),
        [number % 1000, *(i % 1000 for i in range(1, length))],  # no two have a prefix in common
        SamplingParams(max_tokens),
        Request(priority=priority, client=client),
    )


def admit(queue: WaitingQueue) -> Sequence:
    seq = queue.peek()
    assert seq is not None
    queue.admit(seq)
    queue.check_integrity()
    return seq


def admitted(queue: WaitingQueue, n: int) -> str:
    return "".join(admit(queue).request.client.name for _ in range(n))


def make_scheduler(**limits: int) -> Scheduler:
    usual = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 4000}
    return schedulers.make_scheduler(1000, **(usual | limits))


def step(scheduler: Scheduler) -> list[Sequence]:
    planned = answered(scheduler)
    assert planned
    return [row.seq for row in planned.rows]


@hypothesis.settings(deadline=None, derandomize=True, max_examples=25)
@hypothesis.given(
    weights=st.lists(st.sampled_from([0.5, 1.0, 2.0, 4.0]), min_size=2, max_size=4),
    slots=st.integers(1, 8),
    seed=st.integers(0, 2**32),
)
def test_backlogged_clients_get_tokens_by_weight(
    weights: list[float], slots: int, seed: int
) -> None:
    """While both have requests waiting, no two clients' weighted tokens come further apart than
    what can be admitted before the one behind is next: the bound of Sheng et al."""
    rng = random.Random(1)
    queue = WaitingQueue(8)
    clients = [Client(f"client{i}", weight) for i, weight in enumerate(weights)]
    longest = {c.name: (rng.randint(1, 200), rng.randint(1, 100)) for c in clients}
    running: deque[list[Sequence | int]] = deque()
    had: Counter[str] = Counter()
    cost = max(2 * slots * output + input_ for input_, output in longest.values())
    bound = 2 * cost / min(weights) + 1e-6
    for _ in range(300):
        while len(running) < slots:
            for client in clients:  # two at least: one waits even while the other is admitted
                while queue.waiting_of(client)[0] < rng.choice([2, 2, 20]):
                    queue.push(make(client, rng.randint(1, longest[client.name][0])))
            seq = admit(queue)
            had[seq.request.client.name] += seq.num_tokens
            running.append([seq, rng.randint(1, longest[seq.request.client.name][1])])
        for _ in range(slots):
            seq, left = running.popleft()
            assert isinstance(seq, Sequence)
            assert isinstance(left, int)
            seq.usage.add_output(1)
            had[seq.request.client.name] += 2
            if left > 1:
                running.append([seq, left - 1])
        shares = [had[c.name] / c.weight for c in clients]
        assert max(shares) - min(shares) <= bound


def test_generated_tokens_count_so_that_a_slot_that_frees_goes_to_another() -> None:
    scheduler = make_scheduler()
    for _ in range(20):
        assert scheduler.add(make(A, max_tokens=10)) is None
    for _ in range(5):
        assert {seq.request.client for seq in step(scheduler)} == {A}
    for _ in range(3):
        assert scheduler.add(make(B, length=30, max_tokens=40)) is None
    running = step(scheduler)
    while {seq.request.client for seq in running} == {A}:
        assert len(running) == 4
        running = step(scheduler)
    # A's four ended at once, after 40 tokens since B came: those are worth two of B's prompts.
    assert Counter(seq.request.client.name for seq in running) == {"b": 2, "a": 2}


def test_time_without_requests_earns_nothing() -> None:
    queue = WaitingQueue(8)
    for _ in range(200):
        queue.push(make(A, length=10))
    admitted(queue, 100)
    for _ in range(20):
        queue.push(make(B, length=10))
    assert Counter(admitted(queue, 20)) == {"a": 10, "b": 10}


def test_tokens_count_whatever_the_priority() -> None:
    queue = WaitingQueue(8)
    for _ in range(20):
        queue.push(make(B, length=10))
        queue.push(make(A, length=10))
    for _ in range(7):
        queue.push(make(A, length=10, priority=-1))
    assert admitted(queue, 7) == "a" * 7
    assert admitted(queue, 7) == "b" * 7


def test_a_client_is_one_whatever_frontends_it_comes_through() -> None:
    queue = WaitingQueue(8)
    for _ in range(10):
        for connection in range(5):
            queue.push(make(A, connection=connection))
        queue.push(make(B, connection=9))
    assert Counter(admitted(queue, 14)) == {"a": 7, "b": 7}
    # While anonymous requests count as their frontend's.
    queue = WaitingQueue(8)
    for _ in range(10):
        for connection in range(5):
            queue.push(make(ANONYMOUS, connection=connection))
    assert Counter(admit(queue).key.connection for _ in range(7)).most_common(1)[0][1] == 2


def test_a_changed_weight_counts_from_then_on() -> None:
    queue = WaitingQueue(8)
    for _ in range(40):
        queue.push(make(A))
        queue.push(make(B))
    assert Counter(admitted(queue, 14)) == {"a": 7, "b": 7}
    queue.push(make(Client("b", weight=3.0)))
    taken = Counter(admitted(queue, 24))
    assert taken["b"] == pytest.approx(3 * taken["a"], abs=4)


def test_a_flood_of_old_requests_does_not_take_the_turns_of_the_oldest() -> None:
    """The documented bound: 8 admissions for each client that waits, for each request that the
    client itself has waiting already."""
    queue = WaitingQueue(8)
    for _ in range(3000):
        queue.push(make(A))
    before = [make(B, priority=1000) for _ in range(3)]
    for seq in before:
        queue.push(seq)
    for _ in range(OLDEST_EVERY * 3 * len(before)):
        queue.push(make(C, priority=-5))  # better ones keep coming
        admit(queue)
    assert not any(seq in queue for seq in before)


def test_a_named_client_may_have_as_much_waiting_as_there_is_room_left() -> None:
    scheduler = make_scheduler(max_waiting=100)

    def flood(client: Client) -> End:
        while (end := scheduler.add(make(client))) is None:
            pass
        assert end.cause is FinishCause.QUEUE_FULL
        return end

    assert "50 of this client's requests are waiting" in flood(A).message
    flood(B)
    assert scheduler.add(make(C)) is None
    flood(C)
    waiting = [scheduler._waiting.waiting_of(client)[0] for client in (A, B, C)]
    assert waiting == [50, 25, 13]
    scheduler.check_integrity()
    # Anonymous requests may fill it up, as before.
    assert "100 requests are waiting" in flood(ANONYMOUS).message


def test_callers_without_a_name_leave_room_for_clients_that_have_one() -> None:
    """32 prompts of 32,000 tokens by callers of a frontend that asks for no tokens must not keep a
    client out that sends 100 tokens through another frontend."""
    scheduler = make_scheduler(max_waiting_tokens=1 << 20, max_model_len=40_000)
    scheduler.clients_have_names = True
    taken = [scheduler.add(make(ANONYMOUS, 32_000, connection=i)) is None for i in range(33)]
    assert sum(taken) == 16
    assert scheduler.add(make(A, 100)) is None
    for _ in range(150):
        scheduler.add(make(ANONYMOUS))
    assert scheduler.num_waiting < 100
    assert scheduler.add(make(B)) is None


def test_a_named_client_may_have_as_many_tokens_waiting_as_there_is_room_left() -> None:
    scheduler = make_scheduler(max_waiting_tokens=1000)
    for _ in range(5):
        assert scheduler.add(make(A, length=100)) is None
    refused = scheduler.add(make(A, length=100))
    assert refused
    assert refused.message == (
        "500 of this client's tokens are waiting; 100 more would exceed its share of the queue, 500"
    )
    assert scheduler.add(make(B, length=400)) is None
    again = make(A, length=100)
    again.request = replace(again.request, resubmitted=True)
    assert scheduler.add(again) is None


def test_short_prompts_overtake_only_as_long_as_their_client_had_no_more() -> None:
    """Half of a step is for short prompts, but not for a flood of them if others wait."""
    scheduler = make_scheduler(max_num_seqs=16, max_waiting=10_000)
    others = [B, C, Client("d")]
    for _ in range(100):
        for _ in range(8):
            assert scheduler.add(make(A, length=8, max_tokens=1)) is None
        for client in others:
            assert scheduler.add(make(client, length=300, max_tokens=1)) is None
    prompts: Counter[str] = Counter()
    for _ in range(200):
        planned = answered(scheduler)
        assert planned
        for row in planned.rows:
            prompts[row.seq.request.client.name] += row.num_tokens + 2 * row.samples
    assert all(scheduler._waiting.waiting_of(client)[0] for client in (A, *others))
    assert max(prompts.values()) - min(prompts.values()) <= 2 * 300


def test_random_floods_leave_nothing_behind(seed: int) -> None:
    rng = random.Random(seed)
    scheduler = make_scheduler(max_waiting=60)
    clients = [A, B, C, ANONYMOUS]
    for _ in range(400):
        for _ in range(rng.choice([0, 1, 8])):
            scheduler.add(
                make(
                    rng.choice(clients),
                    rng.randint(1, 40),
                    rng.randint(1, 8),
                    rng.randint(-1, 1),
                    rng.randrange(2),
                )
            )
        if rng.random() < 0.3 and (keys := scheduler.open_sequences()):
            scheduler.abort(rng.choice(keys))
        if scheduler.num_waiting or scheduler.num_running:
            step(scheduler)
    while scheduler.num_waiting or scheduler.num_running:
        step(scheduler)
    assert not scheduler._waiting.usages
