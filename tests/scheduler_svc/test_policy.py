"""The scheduling policy: sharing out a step, preemption and refusal."""

from __future__ import annotations

import pytest

from scheduler_svc.core.admission import Limits
from scheduler_svc.core.block_manager import BlockManager
from scheduler_svc.core.sampling import SamplingParams
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import FinishCause, Request, Sequence, Status
from scheduler_svc.core.step import Answer, Step, StepTiming
from scheduler_svc.load import Load, Rate


def make_scheduler(num_blocks: int = 1000, **limits: int) -> Scheduler:
    values = {
        "max_num_seqs": 16,
        "max_num_batched_tokens": 64,
        "max_model_len": num_blocks * 4,
        "max_waiting": 100,
        "vocab_size": 1000,
        "max_num_prefill_tokens": 16,
    }
    return Scheduler(Limits(**values | limits), BlockManager(num_blocks, 4))


def add(
    scheduler: Scheduler,
    number: int,
    length: int,
    max_tokens: int = 50,
    priority: int = 0,
    connection: int = 0,
    salt: str = "",
) -> Sequence:
    prompt = [(number * 31 + i) % 1000 for i in range(length)]
    seq = Sequence(
        (connection, number),
        prompt,
        SamplingParams(max_tokens),
        Request(priority=priority, cache_salt=salt),
    )
    assert scheduler.add(seq) is None
    return seq


def step(scheduler: Scheduler) -> dict[int, int]:
    """Plans and applies a step; returns the tokens per sequence, in order."""
    planned = scheduler.schedule()
    assert planned
    scheduler.apply(planned, Answer([7] * len(planned.rows)))
    scheduler.check_integrity()
    return {row.seq.key.number: row.num_tokens for row in planned.rows}


def test_prompts_take_the_whole_budget_only_where_nothing_decodes() -> None:
    scheduler = make_scheduler()
    add(scheduler, 1, 70)
    add(scheduler, 2, 100)
    assert step(scheduler) == {1: 64}
    assert step(scheduler) == {1: 6, 2: 58}
    assert step(scheduler) == {1: 1, 2: 16}
    assert step(scheduler) == {1: 1, 2: 16}
    assert step(scheduler) == {1: 1, 2: 10}
    assert step(scheduler) == {1: 1, 2: 1}


def test_short_prompts_do_not_wait_for_a_long_ones_chunks() -> None:
    scheduler = make_scheduler()
    add(scheduler, 1, 3)
    step(scheduler)
    add(scheduler, 2, 400)
    add(scheduler, 3, 300)
    assert step(scheduler) == {1: 1, 2: 16}
    for number in (4, 5, 6):
        add(scheduler, number, 5)
    # Half of the 16 tokens go to short prompts, the rest to the long one that came first.
    assert step(scheduler) == {1: 1, 4: 5, 2: 11}
    assert step(scheduler) == {1: 1, 4: 1, 5: 5, 2: 11}
    assert step(scheduler) == {1: 1, 4: 1, 5: 1, 6: 5, 2: 11}
    # Long prompts run one after another.
    assert step(scheduler) == {1: 1, 4: 1, 5: 1, 6: 1, 2: 16}


@pytest.mark.parametrize(("num_blocks", "overtakes"), [(24, True), (23, False)])
def test_a_short_prompt_takes_nothing_that_the_next_one_needs(
    num_blocks: int, overtakes: bool
) -> None:
    scheduler = make_scheduler(num_blocks=num_blocks)
    add(scheduler, 1, 39, max_tokens=8)
    step(scheduler)  # takes 10 blocks; the next one needs 12, the short one 2
    add(scheduler, 2, 48, max_tokens=9)
    add(scheduler, 3, 5)
    assert step(scheduler) == ({1: 1, 3: 5, 2: 11} if overtakes else {1: 1, 2: 16})


def test_a_short_prompt_leaves_a_slot_for_the_next_one() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    add(scheduler, 1, 100)
    step(scheduler)
    add(scheduler, 2, 100)
    add(scheduler, 3, 5)
    while 2 not in (shares := step(scheduler)):
        assert 3 not in shares


def test_a_higher_priority_is_admitted_first() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    add(scheduler, 1, 5, max_tokens=1)
    add(scheduler, 2, 5, max_tokens=1, priority=1)
    add(scheduler, 3, 5, max_tokens=1)
    add(scheduler, 4, 5, max_tokens=1, priority=-1)
    assert [list(step(scheduler)) for _ in range(4)] == [[4], [1], [3], [2]]


def test_the_lowest_priority_is_preempted_then_the_latest_arrival() -> None:
    scheduler = make_scheduler(num_blocks=8)
    seqs = [
        add(scheduler, number, 7, max_tokens=20, priority=priority)
        for number, priority in enumerate([0, 5, 0, 0])
    ]
    step(scheduler)
    step(scheduler)  # 8 tokens each: all blocks are full
    step(scheduler)  # all need another block; each preemption frees two
    assert [s.status for s in seqs] == [
        Status.RUNNING,
        Status.WAITING,
        Status.RUNNING,
        Status.WAITING,
    ]


def test_no_work_is_spent_on_what_is_past_its_deadline() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    add(scheduler, 1, 5, max_tokens=3)
    late = Sequence((0, 2), [1] * 5, SamplingParams(5), Request(deadline=10.0))
    scheduler.add(late)
    step(scheduler)
    assert [(o.seq, o.finished) for o in scheduler.expire(10.0)] == [(late, FinishCause.DEADLINE)]
    while scheduler.num_running:
        assert 2 not in step(scheduler)
    assert scheduler.schedule() is None


def test_the_queue_is_limited_in_tokens_too() -> None:
    scheduler = make_scheduler(max_waiting_tokens=100, max_waiting=5)
    add(scheduler, 1, 150)  # may exceed the limit if alone
    refused = scheduler.add(Sequence((0, 2), [1] * 3, SamplingParams(5)))
    assert refused
    assert refused.cause is FinishCause.QUEUE_FULL
    assert "150" in refused.message
    assert "100" in refused.message
    step(scheduler)
    add(scheduler, 3, 50)
    add(scheduler, 4, 50)
    refused = scheduler.add(Sequence((0, 5), [1], SamplingParams(5)))
    assert refused
    assert refused.cause is FinishCause.QUEUE_FULL


def test_what_was_accepted_once_is_not_refused_after_a_lost_connection() -> None:
    scheduler = make_scheduler(max_waiting=1)
    add(scheduler, 1, 5)
    again = Sequence((0, 2), [1] * 3, SamplingParams(5), Request(resubmitted=True))
    assert scheduler.add(again) is None
    refused = scheduler.add(Sequence((0, 3), [1], SamplingParams(5)))
    assert refused
    assert "2 requests are waiting" in refused.message


@pytest.mark.parametrize(("salts", "cached"), [(("a", "a"), 8), (("", "a"), 0), (("a", "b"), 0)])
def test_a_prefix_is_shared_only_under_the_same_salt(salts: tuple[str, str], cached: int) -> None:
    scheduler = make_scheduler()
    for number, salt in enumerate(salts):
        seq = Sequence((0, number), [5] * 10, SamplingParams(1), Request(cache_salt=salt))
        scheduler.add(seq)
        step(scheduler)
    assert seq.started.num_cached_tokens == cached


def test_the_head_of_the_queue_is_not_matched_again_until_it_may_fit() -> None:
    scheduler = make_scheduler(num_blocks=10)
    add(scheduler, 1, 20, max_tokens=20)
    waiting = add(scheduler, 2, 24, max_tokens=5)
    matched = 0
    original = scheduler.blocks._match_prefix

    def counted(seq: Sequence) -> list[int]:
        nonlocal matched
        matched += seq is waiting
        return original(seq)

    scheduler.blocks._match_prefix = counted  # type: ignore[method-assign]
    while 2 not in step(scheduler):
        pass
    assert matched == 2


def test_rates_follow_what_happens() -> None:
    rate = Rate(100.0, window_s=10.0)
    assert rate.per_second(100.0) == 0
    for second in range(101, 131):
        rate.add(5, float(second))
    assert rate.per_second(130.0) == pytest.approx(5, rel=0.1)
    assert rate.per_second(140.0) == pytest.approx(5 / 2.718, rel=0.1)
    assert rate.per_second(300.0) < 0.001


def test_retry_after_is_shorter_where_the_queue_moves_faster() -> None:
    def retry_after(admissions_per_s: int) -> float:
        scheduler = make_scheduler()
        for number in range(50):
            add(scheduler, number, 5)
        load = Load(scheduler, 0.0)
        assert load.retry_after_s(0.0) == 1.0  # nothing is known yet
        for second in range(1, 21):
            scheduler.stats.admissions += admissions_per_s
            load.step_answered(Step(second, []), StepTiming(0.1, 0.0, float(second)))
        return load.retry_after_s(20.0)

    assert retry_after(10) == pytest.approx(0.5, rel=0.2)  # one tenth of the 50 waiting
    assert retry_after(1) == pytest.approx(5, rel=0.2)
