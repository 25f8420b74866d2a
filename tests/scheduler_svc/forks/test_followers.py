"""Completions of one prompt: it is computed once, and blocks they cannot share are copied."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler_svc.core.sampling import SamplingParams
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import FinishCause, Request, Sequence, Status
from scheduler_svc.core.step import Step
from tests.oracle import completion
from tests.scheduler_svc.schedulers import (
    answered,
    generated,
    make,
    make_scheduler,
    planned,
    refused,
    run,
    sample,
)

BLOCK = 4


def next_step(scheduler: Scheduler) -> Step:
    step = answered(scheduler)
    assert step is not None
    return step


def sequences(scheduler: Scheduler) -> dict[int, Sequence]:
    return {key.number: seq for key, seq in scheduler._sequences.items()}


@pytest.mark.parametrize("prompt_len", [1, 2, 4, 5, 6, 8, 9])
def test_a_prompt_is_computed_once(prompt_len: int) -> None:
    scheduler = make_scheduler()
    prompt = list(range(prompt_len))
    assert scheduler.add(make(5, prompt, max_tokens=7), n=3) is None
    seqs = sequences(scheduler)
    assert list(seqs) == [5, 6, 7]
    assert [seq.status for seq in seqs.values()] == [Status.WAITING] + [Status.FOLLOWING] * 2
    assert [(r.seq.key.number, r.num_tokens) for r in next_step(scheduler).rows] == [
        (5, prompt_len)
    ]

    second = next_step(scheduler)
    assert [(r.seq.key.number, r.start, r.num_tokens) for r in second.rows] == [
        (5, prompt_len, 1),
        (6, prompt_len - 1, 1),
        (7, prompt_len - 1, 1),
    ]
    shared = (prompt_len - 1) // BLOCK
    tables = [seq.blocks.tables[0].tolist() for seq in seqs.values()]
    assert all(table[:shared] == tables[0][:shared] for table in tables)
    assert len({table[shared] for table in tables}) == 3
    copies = [(tables[0][shared], table[shared]) for table in tables[1:]]
    assert second.copies == (copies if (prompt_len - 1) % BLOCK else [])
    assert [seqs[n].started.num_cached_tokens for n in (5, 6, 7)] == [0] + [prompt_len - 1] * 2

    run(scheduler)
    assert all(generated(seq) == completion(prompt, 7) for seq in seqs.values())


def test_siblings_are_the_request_with_another_number_and_seed() -> None:
    scheduler = make_scheduler()
    params = SamplingParams(3, seed=2**64 - 1, top_k=4, prompt_logprobs=2)
    first = Sequence((0, 1), [1, 2], params, Request(deadline=9.0, priority=3))
    scheduler.add(first, n=2)
    second = sequences(scheduler)[2]
    assert second.params == replace(params, seed=0, prompt_logprobs=None)
    assert second.request is first.request
    assert {o.seq.key.number for o in scheduler.expire(9.0)} == {1, 2}
    assert not scheduler.open_sequences()


def test_completions_count_as_one_in_the_queue_and_are_rejected_together() -> None:
    scheduler = make_scheduler(max_waiting=2)
    assert scheduler.add(make(1, [1]), n=8) is None
    assert scheduler.num_waiting == 1
    assert scheduler.add(make(10, [1]), n=8) is None
    refused(scheduler.add(make(20, [1]), n=2))
    assert len(scheduler.open_sequences()) == 16


@pytest.mark.parametrize(
    ("number", "n", "generated_ids", "word"),
    [
        (1, 0, (), "sampling.n: 0; must be in [1, 64]"),
        (1, 65, (), "sampling.n: 65; must be in [1, 64]"),
        (1, -3, (), "sampling.n: -3"),
        (1, 2, (7,), "resumed"),
        (2**64 - 2, 3, (), "request"),
        (48, 3, (), "in use"),
    ],
)
def test_impossible_numbers_of_completions_are_refused(
    number: int, n: int, generated_ids: tuple[int, ...], word: str
) -> None:
    scheduler = make_scheduler()
    scheduler.add(make(50, [1]))
    end = scheduler.add(make(number, [1], generated=generated_ids), n)
    assert word in refused(end, FinishCause.INVALID).message
    assert scheduler.open_sequences() == [(0, 50)]


def test_without_a_slot_a_sibling_waits_before_new_ones_and_finds_the_prompt_cached() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    prompt = list(range(9))
    scheduler.add(make(1, prompt, max_tokens=2), n=2)
    second = sequences(scheduler)[2]
    scheduler.add(make(3, [3], max_tokens=1))
    answered(scheduler)
    assert second.status is Status.WAITING
    order = [next_step(scheduler).rows[0].seq.key.number for _ in range(4)]
    assert order == [1, 2, 2, 3]
    assert second.started.num_cached_tokens == 8
    assert generated(second) == completion(prompt, 2)


def test_a_prompt_that_fails_for_good_ends_those_that_follow_too() -> None:
    scheduler = make_scheduler()
    scheduler.add(make(1, [1, 2, 3]), n=3)
    step = planned(scheduler)
    outputs = scheduler.fail(step.rows[0].seq, "internal error")
    assert {(o.seq.key.number, o.end.cause) for o in outputs} == {
        (n, FinishCause.INTERNAL) for n in (1, 2, 3)
    }
    assert not scheduler.open_sequences()


def test_the_first_follower_leads_when_the_leader_ends_too_early() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    prompt = list(range(12))
    scheduler.add(make(1, prompt, max_tokens=2), n=3)
    seqs = sequences(scheduler)
    step = planned(scheduler)  # part of the prompt
    scheduler.abort((0, 1))
    scheduler.check_integrity()
    assert [seqs[n].status for n in (2, 3)] == [Status.WAITING, Status.FOLLOWING]
    scheduler.apply(step, sample(step))
    scheduler.abort((0, 2))
    assert seqs[3].status is Status.WAITING
    run(scheduler)
    assert generated(seqs[3]) == completion(prompt, 2)
