"""Steps in flight are lost, but not the cache: nothing that is answered is computed again."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler_svc.core.sampling import Grammar, SamplingParams
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import Sequence, Status
from scheduler_svc.core.step import Answer, Logprobs, Step
from tests.oracle import VOCAB_SIZE, completion, logprobs, states
from tests.scheduler_svc.schedulers import answered, generated, make, make_scheduler, run, sample

MASK = b"\xff" * 128


def planned(scheduler: Scheduler) -> Step:
    step = scheduler.schedule()
    assert step is not None
    return step


def rewind(scheduler: Scheduler) -> None:
    scheduler.rewind_all()
    scheduler.check_integrity()


def rows_of(step: Step) -> list[tuple[int, int, int, bool]]:
    """Number, start, tokens, and whether it samples."""
    return [(row.seq.key.number, row.start, row.num_tokens, row.samples) for row in step.rows]


@pytest.mark.parametrize("num_lost", [0, 1, 2])
def test_a_sequence_goes_on_after_its_last_answered_step(num_lost: int) -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4)
    seq = make(1, list(range(10)), 4)
    scheduler.add(seq)
    answered(scheduler)
    for _ in range(num_lost):
        planned(scheduler)
    table, published = seq.block_table, seq.num_published_blocks
    rewind(scheduler)
    assert seq.block_table is table
    assert (seq.num_computed_tokens, seq.num_scheduled_tokens) == (4, 4)
    assert (seq.num_unscheduled_tokens, seq.num_published_blocks) == (6, published)
    starts = [row.start for step in iter(lambda: answered(scheduler), None) for row in step.rows]
    assert starts == [4, 8, 10, 11, 12]
    assert generated(seq) == completion(range(10), 4)
    assert scheduler.stats.preemptions == scheduler.stats.lost_tokens == 0


def test_a_token_that_is_not_known_is_sampled_again() -> None:
    scheduler = make_scheduler()
    seq = make(1, [1, 2, 3], 3)
    scheduler.add(seq)
    answered(scheduler)
    steps = [planned(scheduler), planned(scheduler)]
    assert steps[1].rows[0].previous_row == 0
    rewind(scheduler)
    step = planned(scheduler)
    assert step.number > steps[1].number
    assert rows_of(step) == [(1, 3, 1, True)]
    assert step.rows[0].previous_row is None
    scheduler.apply(step, sample(step))
    run(scheduler, ahead=1)
    assert generated(seq) == completion([1, 2, 3], 3)


def test_the_last_token_is_sampled_again() -> None:
    scheduler = make_scheduler()
    seq = make(1, [1, 2, 3], 1)
    scheduler.add(seq)
    planned(scheduler)
    assert seq.num_unscheduled_tokens == 0
    rewind(scheduler)
    run(scheduler)
    assert generated(seq) == completion([1, 2, 3], 1)


def test_blocks_of_lost_tokens_are_not_published() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4, max_num_seqs=4)
    scheduler.add(make(1, [1] * 12, 4))
    answered(scheduler)
    planned(scheduler)
    rewind(scheduler)
    other = make(2, [1] * 12)
    assert scheduler.blocks.allocate_prompt(other)
    assert other.num_computed_tokens == 4


def test_blocks_of_the_ended_are_free_at_once() -> None:
    scheduler = make_scheduler(num_blocks=8)
    scheduler.add(make(1, [1] * 9))
    planned(scheduler)
    planned(scheduler)
    scheduler.abort((0, 1))
    assert scheduler.blocks.num_free_blocks == 8 - 3
    rewind(scheduler)
    assert scheduler.blocks.num_free_blocks == 8
    assert scheduler.blocks.num_cached_blocks == 0


def test_a_sequence_that_ends_after_a_rewind_waits_for_no_lost_step() -> None:
    scheduler = make_scheduler(num_blocks=8)
    scheduler.add(make(1, [1] * 9))
    answered(scheduler)
    planned(scheduler)
    rewind(scheduler)
    scheduler.abort((0, 1))
    scheduler.check_integrity()
    assert scheduler.blocks.num_free_blocks == 8


def test_decodes_are_preempted_for_room_after_a_rewind() -> None:
    """No step is in flight any more that preemption would wait for."""
    scheduler = make_scheduler(num_blocks=4)
    for number in (1, 2):
        scheduler.add(make(number, [number] * 7, 8))
    for _ in range(2):
        planned(scheduler)
    assert scheduler.schedule() is None
    rewind(scheduler)
    run(scheduler)
    assert scheduler.stats.preemptions > 0


@pytest.mark.parametrize("lost", ["with the prompt", "with the copies", "with both"])
def test_followers_are_forked_once_and_their_copies_made_again(lost: str) -> None:
    scheduler = make_scheduler()
    prompt = list(range(6))
    scheduler.add(make(1, prompt, 4), n=3)
    seqs = list(scheduler._sequences.values())
    if lost != "with the copies":
        planned(scheduler)
        rewind(scheduler)
        assert [seq.status for seq in seqs] == [Status.RUNNING] + [Status.FOLLOWING] * 2
    answered(scheduler)
    if lost != "with the prompt":
        copies = planned(scheduler).copies
        assert len(copies) == 2
        scheduler.abort((0, 2))
        rewind(scheduler)
        step = planned(scheduler)
        assert step.copies == copies[1:]
        assert rows_of(step) == [(1, 6, 1, True), (3, 5, 1, True)]
        scheduler.apply(step, sample(step))
        del seqs[1]
    run(scheduler)
    assert all(generated(seq) == completion(prompt, 4) for seq in seqs)


def test_a_leader_that_ends_in_a_lost_step_is_followed_by_the_next() -> None:
    scheduler = make_scheduler()
    scheduler.add(make(1, list(range(6)), 4), n=2)
    second = list(scheduler._sequences.values())[1]
    planned(scheduler)
    scheduler.abort((0, 1))
    rewind(scheduler)
    run(scheduler)
    assert generated(second) == completion(range(6), 4)


GRAMMAR = Grammar(2, "[a-z]+")


def paused(number: int, prompt: list[int], max_tokens: int = 3) -> Sequence:
    return Sequence((0, number), prompt, SamplingParams(max_tokens, grammar=GRAMMAR))


def test_a_lost_step_of_a_grammar_needs_no_other_mask() -> None:
    scheduler = make_scheduler()
    seq = paused(1, [1, 2, 3])
    scheduler.add(seq)
    seq.unpause([MASK])
    answered(scheduler)
    seq.unpause([MASK])
    planned(scheduler)
    rewind(scheduler)
    step = planned(scheduler)
    assert rows_of(step) == [(1, 3, 1, True)]
    assert seq.features is not None
    assert seq.features.masks == [MASK]
    scheduler.apply(step, sample(step))
    assert scheduler.schedule() is None


@pytest.mark.parametrize("unpaused", ["before", "after"])
def test_a_paused_sequence_stays_paused_until_its_mask_is_there(unpaused: str) -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4)
    seq = paused(1, list(range(7)))
    scheduler.add(seq)
    answered(scheduler)
    planned(scheduler)  # the prompt but its last token
    if unpaused == "before":
        seq.unpause([MASK])
        rewind(scheduler)
    else:
        rewind(scheduler)
        step = planned(scheduler)
        assert rows_of(step) == [(1, 4, 2, False)]
        scheduler.apply(step, sample(step))
        assert scheduler.schedule() is None
        rewind(scheduler)  # with nothing in flight
        assert scheduler.schedule() is None
        seq.unpause([MASK])
    while scheduler.open_sequences():
        assert answered(scheduler) is not None
        if seq.status is not Status.FINISHED and seq.paused:
            seq.unpause([MASK])
    assert generated(seq) == completion(range(7), 3)


def test_log_probabilities_of_a_prompt_are_delivered_once() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4)
    prompt = list(range(11))
    seq = Sequence((0, 1), prompt, SamplingParams(2, prompt_logprobs=1))
    scheduler.add(seq)
    delivered: list[int] = []
    for turn in range(9):
        step = scheduler.schedule()
        if step is None:
            break
        if turn % 2:  # every other step is lost
            rewind(scheduler)
            continue
        (row,) = step.rows
        scored = range(row.start, min(row.start + row.num_tokens, len(prompt) - 1))
        rows = [logprobs(states(prompt[: i + 1])[-1], prompt[i + 1], 1) for i in scored]
        found = Logprobs(
            np.array([ids for ids, _ in rows], np.int32),
            np.array([values for _, values in rows], np.float32),
        )
        answer = Answer(sample(step).token_ids, {}, {0: found} if rows else {})
        for output in scheduler.apply(step, answer):
            if output.prompt_logprobs is not None:
                assert output.offset == len(delivered) + 1
                delivered += output.prompt_logprobs.ids[:, 0].tolist()
    assert delivered == prompt[1:]
    assert generated(seq) == completion(prompt, 2)


def candidates(step: Step) -> Answer:
    """The answer for a step of beams, each with its most likely tokens."""
    found = {}
    for i, row in enumerate(step.rows):
        end = row.start + row.num_tokens
        assert end == row.seq.num_tokens, "samples after another token than its last"
        state = states(row.seq.tokens)[-1]
        ids, values = logprobs(state, state % VOCAB_SIZE, row.seq.params.num_logprobs or 0)
        found[i] = Logprobs(np.array([ids], np.int32), np.array([values], np.float32))
    return Answer([0] * len(step.rows), found)


@pytest.mark.parametrize("every", [1, 2, 3])
def test_a_beam_that_waits_for_the_others_goes_on_with_them(every: int) -> None:
    """There are fewer slots than beams, so that a token of all beams takes two steps."""

    def completions(lost: int | None) -> list[tuple[int, int | None]]:
        scheduler = make_scheduler(max_num_seqs=2)
        scheduler.add(Sequence((0, 1), [1, 2, 3], SamplingParams(4, beam_width=3)))
        found: list[tuple[int, int | None]] = []
        while scheduler.open_sequences():
            step = planned(scheduler)
            if lost is not None and step.number % every == lost:
                rewind(scheduler)
                step = planned(scheduler)
            outputs = scheduler.apply(step, candidates(step))
            found += [(output.seq.key.number, output.token) for output in outputs]
            scheduler.check_integrity()
            if lost is not None:
                rewind(scheduler)  # with nothing in flight
        assert scheduler.blocks.num_free_blocks == scheduler.blocks.num_blocks
        return found

    for lost in range(every):
        assert completions(lost) == completions(None)


def test_a_cache_that_is_lost_after_all_is_computed_again() -> None:
    scheduler = make_scheduler()
    seq = make(1, list(range(6)), 4)
    scheduler.add(seq, n=2)
    answered(scheduler)
    planned(scheduler)
    rewind(scheduler)
    scheduler.requeue_all()
    scheduler.check_integrity()
    assert scheduler.stats.lost_tokens == 6 + 5
    run(scheduler)
    assert generated(seq) == completion(range(6), 4)
