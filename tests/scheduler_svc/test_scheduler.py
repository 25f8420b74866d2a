"""The scheduler: steps, outputs, preemption, and steps one ahead."""

from __future__ import annotations

import pytest

from scheduler_svc.core.sequence import FinishCause, Status
from scheduler_svc.core.step import Answer
from tests.fake_worker import VOCAB_SIZE, completion
from tests.scheduler_svc.schedulers import (
    answered,
    generated,
    make,
    make_scheduler,
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
        step = scheduler.schedule()
        assert step is not None
        shapes.append([(r.seq.key.number, r.num_tokens, r.samples) for r in step.rows])
        scheduler.apply(step, sample(step))
    assert shapes == [
        [(1, 1, True), (2, 9, False)],
        [(1, 1, True), (2, 9, False)],
        [(1, 1, True), (2, 2, True)],
    ]


@pytest.mark.parametrize("prompt_len", [1, 3, 4, 5, 7, 8, 9, 16])
def test_tokens_are_right_around_block_boundaries(prompt_len: int) -> None:
    scheduler = make_scheduler()
    seq = make(1, list(range(prompt_len)), max_tokens=9)
    scheduler.add(seq)
    outputs = run(scheduler)
    assert [o.token for o in outputs] == completion(range(prompt_len), 9)
    assert [o.offset for o in outputs] == list(range(9))
    assert outputs[-1].finished is FinishCause.LENGTH


def test_eos_and_stop_tokens_end_a_sequence_with_the_token_included() -> None:
    tokens = completion([5, 6], 6)
    scheduler = make_scheduler()
    ends, stops = (
        make(1, [5, 6], 6, eos=frozenset(tokens[2:3])),
        make(2, [5, 6], 6, stop=frozenset(tokens[3:4])),
    )
    scheduler.add(ends)
    scheduler.add(stops)
    finished = {o.seq.key.number: o.finished for o in run(scheduler) if o.finished}
    assert finished == {1: FinishCause.EOS, 2: FinishCause.STOP_TOKEN}
    assert generated(ends) == tokens[:3]
    assert generated(stops) == tokens[:4]


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "word"),
    [([], 5, "prompt"), ([VOCAB_SIZE], 5, "below 1000"), ([-1], 5, "prompt"), ([1], 0, "max_tok")],
)
def test_an_invalid_request_is_rejected(prompt: list[int], max_tokens: int, word: str) -> None:
    output = make_scheduler().add(make(1, prompt, max_tokens))
    assert output is not None
    assert output.cause is FinishCause.INVALID
    assert word in output.message


def test_a_full_queue_refuses_and_loses_nothing() -> None:
    scheduler = make_scheduler(max_waiting=3)
    refused = [scheduler.add(make(n, [n], 2)) for n in range(5)]
    assert [end and end.cause for end in refused] == [None] * 3 + [FinishCause.QUEUE_FULL] * 2
    assert {o.seq.key.number for o in run(scheduler) if o.finished} == {0, 1, 2}


def test_preemption_recomputes_and_changes_no_token() -> None:
    scheduler = make_scheduler(num_blocks=6)
    seqs = [make(n, [n] * 5, max_tokens=14) for n in range(3)]
    for seq in seqs:
        scheduler.add(seq)
    outputs = run(scheduler)
    assert scheduler.stats.preemptions > 0
    for seq in seqs:
        assert generated(seq) == completion([seq.key.number] * 5, 14)
        assert [o.offset for o in outputs if o.seq is seq] == list(range(14))


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
    step = scheduler.schedule()
    assert step is not None
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


def test_deadlines_end_waiting_and_running_sequences() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    scheduler.add(make(1, [1], 50, deadline=10.0))
    scheduler.add(make(2, [2], 50, deadline=5.0))
    answered(scheduler)
    assert scheduler.expire(4.9) == []
    assert [o.seq.key.number for o in scheduler.expire(5.0)] == [2]
    assert [(o.seq.key.number, o.finished) for o in scheduler.expire(20.0)] == [
        (1, FinishCause.DEADLINE)
    ]
    assert scheduler.schedule() is None


def test_resumed_sequences_go_on_after_their_tokens() -> None:
    scheduler = make_scheduler()
    tokens = completion([3, 4], 8)
    seq = make(1, [3, 4], 8, generated=tuple(tokens[:5]))
    scheduler.add(seq)
    outputs = run(scheduler)
    assert [(o.offset, o.token) for o in outputs] == [(i, tokens[i]) for i in (5, 6, 7)]
    whole = make(2, [3, 4], 8, generated=tuple(tokens))
    ended = scheduler.add(whole)
    assert ended is not None
    assert ended.cause is FinishCause.LENGTH


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


def test_a_token_after_the_end_is_dropped_and_its_blocks_fenced() -> None:
    tokens = completion([5] * 3, 9)
    scheduler = make_scheduler(num_blocks=8)
    seq = make(1, [5] * 3, 9, eos=frozenset(tokens[:1]))
    scheduler.add(seq)
    first, second = scheduler.schedule(), scheduler.schedule()
    assert first
    assert second
    outputs = scheduler.apply(first, sample(first))
    assert [(o.token, o.finished) for o in outputs] == [(tokens[0], FinishCause.EOS)]
    scheduler.check_integrity()
    assert scheduler.blocks.num_free_blocks == 8 - 1  # still written by the second step
    assert scheduler.apply(second, Answer([7])) == []
    assert scheduler.blocks.num_free_blocks == 8
    assert scheduler.blocks.num_cached_blocks == 0  # three known tokens fill no block
    assert generated(seq) == tokens[:1]


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


def test_what_a_step_in_flight_writes_is_not_published() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4, max_num_seqs=4)
    scheduler.add(make(1, [1] * 12, 4))
    steps = [scheduler.schedule(), scheduler.schedule()]  # a block each
    assert steps[0]
    scheduler.apply(steps[0], Answer([-1]))
    other = make(2, [1] * 12)
    assert scheduler.blocks.allocate_prompt(other)
    assert other.num_computed_tokens == 4


def test_nothing_in_flight_is_preempted() -> None:
    scheduler = make_scheduler(num_blocks=4)
    first, second = make(1, [1] * 7, 8), make(2, [2] * 7, 8)
    scheduler.add(first)
    scheduler.add(second)
    steps = [scheduler.schedule(), scheduler.schedule()]  # 8 tokens each, all blocks taken
    assert all(steps)
    assert scheduler.schedule() is None
    assert scheduler.num_running == 2
    for step in steps:
        assert step
        assert scheduler.schedule() is None
        scheduler.apply(step, sample(step))
    assert scheduler.schedule() is not None
    assert (first.status, second.status) == (Status.RUNNING, Status.WAITING)


@pytest.mark.parametrize("num_blocks", [6, 64])
def test_one_ahead_gives_the_same_outputs(num_blocks: int) -> None:
    def outputs(ahead: int) -> dict[int, list[tuple[int | None, int, FinishCause | None]]]:
        scheduler = make_scheduler(num_blocks=num_blocks)
        for number in range(5):
            tokens = completion([number] * 5, 14)
            eos = frozenset(tokens[9:10]) if number % 2 else frozenset()
            scheduler.add(make(number, [number] * 5, 14, eos=eos))
        found: dict[int, list[tuple[int | None, int, FinishCause | None]]] = {}
        for o in run(scheduler, ahead=ahead):
            found.setdefault(o.seq.key.number, []).append((o.token, o.offset, o.finished))
        return found

    assert outputs(1) == outputs(0)
