"""The scheduling policy: sharing out a step, preemption and refusal."""

from __future__ import annotations

import pytest

from scheduler_svc.core.sampling import SamplingParams
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import Request, Row, Sequence, Status
from scheduler_svc.core.step import Step, StepTiming
from scheduler_svc.load import Load
from tests.scheduler_svc import schedulers
from tests.scheduler_svc.schedulers import answered, refused


def make_scheduler(num_blocks: int = 1000, **limits: int) -> Scheduler:
    usual = {"max_num_seqs": 16, "max_num_batched_tokens": 64, "max_num_prefill_tokens": 16}
    return schedulers.make_scheduler(num_blocks, max_model_len=4 * num_blocks, **(usual | limits))


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
    planned = answered(scheduler)
    assert planned
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


def test_a_short_prompt_of_lower_priority_does_not_overtake() -> None:
    scheduler = make_scheduler()
    add(scheduler, 1, 3)
    step(scheduler)
    add(scheduler, 2, 400)
    add(scheduler, 3, 300)
    step(scheduler)
    add(scheduler, 4, 5, priority=1)
    assert step(scheduler) == {1: 1, 2: 16}
    add(scheduler, 5, 5)
    assert step(scheduler) == {1: 1, 5: 5, 2: 11}


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


def test_the_queue_is_limited_in_tokens_too() -> None:
    scheduler = make_scheduler(max_waiting_tokens=100, max_waiting=5)
    add(scheduler, 1, 150)  # may exceed the limit if alone
    end = refused(scheduler.add(Sequence((0, 2), [1] * 3, SamplingParams(5))))
    assert "150" in end.message
    assert "100" in end.message
    step(scheduler)
    add(scheduler, 3, 50)
    add(scheduler, 4, 50)
    refused(scheduler.add(Sequence((0, 5), [1], SamplingParams(5))))


def test_the_head_of_the_queue_is_not_matched_again_until_it_may_fit() -> None:
    scheduler = make_scheduler(num_blocks=10)
    add(scheduler, 1, 20, max_tokens=20)
    waiting = add(scheduler, 2, 24, max_tokens=5)
    matched = 0
    original = scheduler.blocks._prefix_to_use

    def counted(seq: Sequence) -> int:
        nonlocal matched
        matched += seq is waiting
        return original(seq)

    scheduler.blocks._prefix_to_use = counted  # type: ignore[method-assign]
    while 2 not in step(scheduler):
        pass
    assert matched == 2


def test_rates_and_the_time_to_retry_follow_recent_steps() -> None:
    """A rejected request returns when a tenth of the 50 waiting requests have been admitted."""
    scheduler = make_scheduler()
    for number in range(50):
        add(scheduler, number, 5)
    load = Load(scheduler, 0.0)
    assert load.retry_after_s(0.0) == 1.0  # nothing is known yet
    for start, per_s in ((20, 10), (60, 1)):
        for now in range(start, start + 20):
            scheduler.stats.admissions += per_s
            scheduler.stats.sampled_tokens += 3 * per_s
            load.step_answered(Step(1, []), StepTiming(0.1, 0.0, now))
        assert load.tokens_per_s(now) == pytest.approx(3 * per_s, rel=0.2)
        assert load.retry_after_s(now) == pytest.approx(5 / per_s, rel=0.2)
    assert load.tokens_per_s(now + 10) == pytest.approx(3 / 2.718, rel=0.2)
    assert load.tokens_per_s(now + 200) < 0.001


def test_times_that_engines_report() -> None:
    scheduler = make_scheduler()
    load = Load(scheduler, 0.0)
    assert load.step_time_s == load.prompt_token_s == 0  # nothing is known yet
    seqs = [add(scheduler, number, 3) for number in range(2)]
    times = scheduler.step_times
    for rows, seconds in ((1, 0.1), (2, 0.16)):
        decodes = [Row(seq, 3, 1, True) for seq in seqs[:rows]]
        times.step_answered(Step(1, decodes, num_decodes=rows), StepTiming(seconds, 0.0, 0.0))
    assert load.step_time_s == pytest.approx(0.1)  # of one sequence, while none runs
    prompts = Step(1, [Row(seqs[0], 0, 600, True)])
    times.step_answered(prompts, StepTiming(6.0, 0.0, 0.0))
    assert load.prompt_token_s == pytest.approx(0.01)
    step(scheduler)
    assert load.step_time_s == pytest.approx(0.16)
    assert load.prompt_token_s == pytest.approx(0.01 + 0.16 / 16)
