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
from scheduler_svc.core.sequence import Request, Sequence
from scheduler_svc.core.waiting_queue import WaitingQueue
from tests.scheduler_svc import schedulers
from tests.scheduler_svc.schedulers import answered, refused

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


def num_waiting(queue: WaitingQueue, client: Client) -> int:
    return queue.usages.of(client, 0).num_waiting


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
                while num_waiting(queue, client) < rng.choice([2, 2, 20]):
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


@pytest.mark.parametrize(("flood", "connection"), [(B, 0), (ANONYMOUS, 1)])
@pytest.mark.parametrize(
    ("length", "limit", "message"),
    [
        (1, {"max_waiting": 20}, "20 requests are waiting; the limit is 20"),
        (50, {"max_waiting_tokens": 1000}, "1000 tokens are waiting; 50 more would exceed"),
    ],
)
def test_a_client_with_nothing_in_the_queue_finds_room(
    flood: Client, connection: int, length: int, limit: dict[str, int], message: str
) -> None:
    scheduler = make_scheduler(**limit)
    while (end := scheduler.add(make(flood, length, connection=connection))) is None:
        pass
    assert message in refused(end).message
    first = make(A, length)
    assert scheduler.add(first) is None
    refused(scheduler.add(make(A, length)))
    again = make(A, length)
    again.request = replace(again.request, resubmitted=True)
    assert scheduler.add(again) is None
    while first not in (running := step(scheduler)):
        scheduler.abort(running[0].key)
    assert scheduler.num_waiting > 10  # the flood's, of which two or three were served
    scheduler.abort(again.key)
    assert scheduler.add(make(A, length)) is None


def test_completions_that_wait_for_a_slot_are_their_clients() -> None:
    scheduler = make_scheduler(max_num_seqs=1, max_waiting=1)
    several = make(A)
    assert scheduler.add(several, n=4) is None
    step(scheduler)
    assert scheduler.num_waiting == 3
    refused(scheduler.add(make(A, connection=1)))
    assert scheduler.add(make(B, connection=1)) is None


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
    assert all(num_waiting(scheduler._waiting, client) for client in (A, *others))
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


def test_time_without_requests_earns_nothing() -> None:
    queue = WaitingQueue(8)
    for _ in range(200):
        queue.push(make(A, length=10))
    admitted(queue, 100)
    for _ in range(20):
        queue.push(make(B, length=10))
    assert Counter(admitted(queue, 20)) == {"a": 10, "b": 10}
