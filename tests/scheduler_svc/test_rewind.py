"""Steps in flight are lost, but not the cache: nothing that is answered is computed again."""

from __future__ import annotations

import pytest

from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import Status
from scheduler_svc.core.step import Step
from tests.oracle import completion
from tests.scheduler_svc.schedulers import answered, generated, make, make_scheduler, run, sample


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
