"""The scheduler: steps, outputs, preemption, and steps one ahead."""

from __future__ import annotations

import pytest

from scheduler_svc.core.sequence import FinishCause
from tests.fake_worker import VOCAB_SIZE, completion
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


def test_decodes_and_prompt_chunks_share_a_step_within_the_budget() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=10)
    first, second = make(1, [1] * 4), make(2, list(range(20)))
    scheduler.add(first)
    answered(scheduler)
    scheduler.add(second)
    shapes = []
    for _ in range(3):
        step = planned(scheduler)
        shapes.append([(r.seq.key.number, r.num_tokens, r.samples) for r in step.rows])
        scheduler.apply(step, sample(step))
    assert shapes == [
        [(1, 1, True), (2, 9, False)],
        [(1, 1, True), (2, 9, False)],
        [(1, 1, True), (2, 2, True)],
    ]


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "word"),
    [([], 5, "prompt"), ([VOCAB_SIZE], 5, "below 1000"), ([-1], 5, "prompt"), ([1], 0, "max_tok")],
)
def test_an_invalid_request_is_rejected(prompt: list[int], max_tokens: int, word: str) -> None:
    end = make_scheduler().add(make(1, prompt, max_tokens))
    assert word in refused(end, FinishCause.INVALID).message


def test_a_preempted_sequence_counts_its_prompt_once() -> None:
    scheduler = make_scheduler(num_blocks=4)
    for number in (1, 2):
        scheduler.add(make(number, [number] * 7, 8))
    run(scheduler)
    assert scheduler.stats.preemptions > 0
    assert scheduler.stats.prompt_tokens == 14
    assert scheduler.stats.cached_prompt_tokens == 0


def test_generated_text_is_cached_for_the_next_turn() -> None:
    scheduler = make_scheduler()
    scheduler.add(make(1, [1] * 6, max_tokens=10))
    run(scheduler)
    turn = [1] * 6 + completion([1] * 6, 10) + [7]
    second = make(2, turn, 2)
    scheduler.add(second)
    run(scheduler)
    assert second.started.num_cached_tokens == 12  # the 15 computed tokens fill three blocks
    assert generated(second) == completion(turn, 2)


def test_abort_frees_blocks_and_a_step_in_flight_fences_them() -> None:
    scheduler = make_scheduler()
    waits, runs = make(1, [1] * 9), make(2, [2] * 9)
    scheduler.add(runs)
    step = planned(scheduler)
    scheduler.add(waits)
    scheduler.abort(waits.key)
    scheduler.abort(runs.key)
    scheduler.check_integrity()
    assert scheduler.blocks.num_free_blocks == 64 - 3  # still held until the answer
    assert scheduler.apply(step, sample(step)) == []
    assert scheduler.blocks.num_free_blocks == 64
    assert scheduler.blocks.num_cached_blocks == 0  # nothing of an aborted step is published
    assert scheduler.schedule() is None
    scheduler.abort(runs.key)


def test_a_step_ahead_names_the_rows_of_tokens_that_are_not_known() -> None:
    scheduler = make_scheduler()
    first, second = make(1, [1] * 3, 3), make(2, [2] * 6, 2)
    scheduler.add(first)
    scheduler.add(second)
    steps = [scheduler.schedule(), scheduler.schedule()]
    rows = [
        [(r.seq.key.number, r.start, r.num_tokens, r.previous_row) for r in step.rows]
        for step in steps
        if step
    ]
    assert rows == [[(1, 0, 3, None), (2, 0, 6, None)], [(1, 3, 1, 0), (2, 6, 1, 1)]]
    assert steps[0]
    scheduler.apply(steps[0], sample(steps[0]))
    # By its max_tokens, the second is known to end with the step in flight.
    third = scheduler.schedule()
    assert third
    assert [(r.seq.key.number, r.start, r.previous_row) for r in third.rows] == [(1, 4, 0)]
    assert scheduler.schedule() is None  # and so will the first


def test_blocks_are_published_when_their_step_was_answered() -> None:
    scheduler = make_scheduler()
    seq = make(1, [1] * 8, 4)
    scheduler.add(seq)
    step = scheduler.schedule()
    assert scheduler.schedule() is not None
    twin = make(2, [1] * 8, 4)
    scheduler.add(twin)
    assert scheduler.schedule() is not None
    assert twin.started.num_cached_tokens == 0
    assert step
    scheduler.apply(step, sample(step))
    third = make(3, [1] * 8, 4)
    scheduler.add(third)
    assert scheduler.schedule() is not None
    assert third.started.num_cached_tokens == 4
