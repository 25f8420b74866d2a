"""Paused sequences, whose next token depends on a decision made after the last one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from scheduler_svc.core.sampling import SamplingParams
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import Sequence, Status
from scheduler_svc.rpc.step_encoding import encode_step
from shared.paging import Paging
from shared.sampling_params import Grammar
from tests.oracle import completion
from tests.scheduler_svc.schedulers import (
    answered,
    generated,
    make_scheduler,
    planned,
    sample,
)

GRAMMAR = Grammar(2, "[a-z]+")
MASK = b"\xff" * 128


def paused(number: int, prompt: list[int], max_tokens: int = 5) -> Sequence:
    return Sequence((0, number), prompt, SamplingParams(max_tokens, grammar=GRAMMAR))


@pytest.mark.parametrize("prompt_len", [1, 2, 5, 9, 20])
def test_all_but_the_last_token_is_computed_before_it_goes_on(prompt_len: int) -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    seq = paused(1, list(range(prompt_len)))
    scheduler.add(seq)
    computed = 0
    while (step := answered(scheduler)) is not None:
        assert [row.samples for row in step.rows] == [False]
        computed += step.rows[0].num_tokens
    assert computed == prompt_len - 1
    seq.unpause([MASK])
    step = planned(scheduler)
    assert [(row.start, row.samples) for row in step.rows] == [(prompt_len - 1, True)]
    features = encode_step(step, Paging(4), 1, 1).features
    assert (len(features.masked), features.masks) == (4, MASK)
    assert scheduler.schedule() is None  # not one step ahead
    scheduler.apply(step, sample(step))
    assert scheduler.schedule() is None


@pytest.mark.parametrize("lose", [Scheduler.requeue_all, Scheduler.rewind_all])
def test_a_lost_step_is_computed_again_without_another_mask(
    lose: Callable[[Scheduler], None],
) -> None:
    scheduler = make_scheduler()
    seq = paused(1, [1, 2, 3])
    scheduler.add(seq)
    seq.unpause([MASK])
    answered(scheduler)
    seq.unpause([MASK])
    assert scheduler.schedule() is not None
    lose(scheduler)
    step = planned(scheduler)
    first = 3 if lose is Scheduler.rewind_all else 0
    assert [(row.start, row.num_tokens, row.samples) for row in step.rows] == [
        (first, 4 - first, True)
    ]
    assert seq.features is not None
    assert seq.features.masks == [MASK]
    scheduler.apply(step, sample(step))
    assert scheduler.schedule() is None


@pytest.mark.parametrize("lose", [Scheduler.requeue_all, Scheduler.rewind_all])
@pytest.mark.parametrize("in_flight", [False, True])
def test_a_paused_sequence_stays_paused_when_workers_are_lost(
    lose: Callable[[Scheduler], None], in_flight: bool
) -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4)
    seq = paused(1, list(range(7)), 2)
    scheduler.add(seq)
    answered(scheduler)
    assert (scheduler.schedule() if in_flight else answered(scheduler)) is not None
    lose(scheduler)
    samples = [row.samples for step in iter(lambda: answered(scheduler), None) for row in step.rows]
    assert not any(samples)
    for _ in range(2):
        seq.unpause([MASK])
        while answered(scheduler) is not None:
            pass
    assert generated(seq) == completion(range(7), 2)


def test_a_sequence_can_be_unpaused_and_aborted_in_any_state() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    runs, waits = paused(1, [1, 2]), paused(2, [1, 2, 3, 4, 5], 1)
    scheduler.add(runs)
    scheduler.add(waits)
    answered(scheduler)
    waits.unpause([MASK])
    assert waits.status is Status.WAITING
    scheduler.abort(runs.key)
    runs.unpause()  # already ended
    step = answered(scheduler)
    assert step is not None
    assert [(row.seq.key.number, row.samples) for row in step.rows] == [(2, True)]
    assert not scheduler.open_sequences()
