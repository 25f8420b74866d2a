"""Token budgets, by a clock that the tests turn."""

from __future__ import annotations

import dataclasses
from itertools import count

import pytest

from scheduler_svc.core.budgets import INPUT as LIMIT
from scheduler_svc.core.budgets import Budgets
from scheduler_svc.core.client import ANONYMOUS, Client
from scheduler_svc.core.sampling import SamplingParams
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import FinishCause, Request, Sequence
from scheduler_svc.core.step import Answer, End
from tests.scheduler_svc.schedulers import make_scheduler, refused

INPUT = Client("in", input_tokens_per_minute=60)
OUTPUT = Client("out", output_tokens_per_minute=600)
_numbers = count(1)


@pytest.fixture
def scheduler() -> Scheduler:
    return make_scheduler(200, max_num_batched_tokens=512, max_model_len=500)


def submit(
    scheduler: Scheduler,
    client: Client,
    now: float,
    length: int = 10,
    max_tokens: int = 1,
    n: int = 1,
    *,
    resubmitted: bool = False,
    generated: int = 0,
) -> End | None:
    number = next(_numbers) * 100
    return scheduler.add(
        Sequence(
            (0, number),
            [1] * length,
            SamplingParams(max_tokens),
            Request(arrival=now, client=client, resubmitted=resubmitted),
            generated_ids=[2] * generated,
        ),
        n,
    )


def run(scheduler: Scheduler, now: float, steps: int = 1000) -> None:
    for _ in range(steps):
        step = scheduler.schedule(now)
        if step is None:
            return
        scheduler.apply(step, Answer([7] * len(step.rows)))


def refused_for_s(end: End | None) -> float:
    retry_after_s = refused(end).retry_after_s
    assert retry_after_s > 0
    return retry_after_s


def test_input_is_charged_when_it_is_accepted(scheduler: Scheduler) -> None:
    for _ in range(7):  # a minute's worth, and the last of them on credit
        assert submit(scheduler, INPUT, now=100.0, length=10) is None or _ == 6
    end = refused(submit(scheduler, INPUT, now=100.0))
    assert "input_tokens_per_minute: all 60 tokens are spent" in end.message
    # Nobody else is concerned.
    assert submit(scheduler, OUTPUT, now=100.0) is None
    assert submit(scheduler, ANONYMOUS, now=100.0) is None


def test_a_debt_is_paid_off_first(scheduler: Scheduler) -> None:
    assert submit(scheduler, INPUT, now=0.0, length=400) is None  # on credit: 340 too many
    assert refused_for_s(submit(scheduler, INPUT, now=0.0)) == pytest.approx(340)
    assert refused_for_s(submit(scheduler, INPUT, now=300.0)) == pytest.approx(40)
    assert submit(scheduler, INPUT, now=340.1) is None


def test_a_bucket_refills_up_to_a_minutes_tokens(scheduler: Scheduler) -> None:
    assert submit(scheduler, INPUT, now=0.0, length=60) is None
    assert submit(scheduler, INPUT, now=3600.0, length=59) is None
    assert submit(scheduler, INPUT, now=3600.0, length=2) is None
    assert refused_for_s(submit(scheduler, INPUT, now=3600.0)) == pytest.approx(1)


def test_output_is_charged_as_it_is_sampled_and_never_cut_off(scheduler: Scheduler) -> None:
    assert submit(scheduler, OUTPUT, now=0.0, max_tokens=200, n=4) is None
    run(scheduler, now=0.0, steps=100)
    assert submit(scheduler, OUTPUT, now=0.0) is None  # 400 of 600 are spent
    run(scheduler, now=0.0)
    assert scheduler.stats.sampled_tokens == 801
    assert scheduler.num_running == 0
    assert refused_for_s(submit(scheduler, OUTPUT, now=0.0)) == pytest.approx(20.1)


def test_output_long_after_the_last_request_is_charged_in_full(scheduler: Scheduler) -> None:
    """The time before it may not pay for it."""
    assert submit(scheduler, OUTPUT, now=0.0, max_tokens=400) is None
    run(scheduler, now=0.0, steps=10)
    run(scheduler, now=1000.0)
    assert submit(scheduler, OUTPUT, now=1000.0, max_tokens=400) is None  # 210 left
    run(scheduler, now=1000.0)
    assert refused_for_s(submit(scheduler, OUTPUT, now=1000.0)) == pytest.approx(19)


def test_a_resubmitted_request_is_neither_rejected_nor_charged_again(
    scheduler: Scheduler,
) -> None:
    assert submit(scheduler, INPUT, now=0.0, length=59) is None
    for _ in range(3):
        assert submit(scheduler, INPUT, now=0.0, length=59, resubmitted=True) is None
    assert submit(scheduler, INPUT, now=0.0) is None  # there was a token left
    assert submit(scheduler, INPUT, now=0.0, resubmitted=True) is None
    assert refused_for_s(submit(scheduler, INPUT, now=0.0)) == pytest.approx(9)
    # Nor is what is computed again after the workers were lost.
    run(scheduler, now=0.0, steps=1)
    scheduler.requeue_all()
    run(scheduler, now=0.0)
    assert refused_for_s(submit(scheduler, INPUT, now=0.0)) == pytest.approx(9)


def test_tokens_to_resume_after_are_input(scheduler: Scheduler) -> None:
    """They are computed, and a client may make them up."""
    assert submit(scheduler, INPUT, now=0.0, length=1, max_tokens=100, generated=79) is None
    assert refused_for_s(submit(scheduler, INPUT, now=0.0)) == pytest.approx(20)


def test_completions_of_one_prompt_are_charged_for_it_once(scheduler: Scheduler) -> None:
    assert submit(scheduler, INPUT, now=0.0, length=59, n=4) is None
    assert submit(scheduler, INPUT, now=0.0) is None


def test_a_rejected_request_costs_nothing(scheduler: Scheduler) -> None:
    for _ in range(10):
        end = submit(scheduler, INPUT, now=0.0, length=600)  # too long for the model
        refused(end, FinishCause.INVALID)
    assert submit(scheduler, INPUT, now=0.0) is None


def test_a_changed_limit_counts_from_then_on() -> None:
    budgets = Budgets()
    budgets.charge(INPUT, LIMIT, 50, now=0.0)
    more = dataclasses.replace(INPUT, input_tokens_per_minute=6000)
    budgets.charge(more, LIMIT, 20, now=0.0)
    assert budgets.refusal(more, now=0.0) == (
        "input_tokens_per_minute",
        "input_tokens_per_minute: all 6000 tokens are spent; retry in 0.1 s",
        pytest.approx(0.1),
    )
    assert budgets.refusal(more, now=0.2) is None
    less = dataclasses.replace(INPUT, input_tokens_per_minute=6)
    assert budgets.refusal(less, now=3600.0) is None
    budgets.charge(less, LIMIT, 12, now=3600.0)
    assert budgets.refusal(less, now=3600.0)
    assert budgets.refusal(INPUT, now=3660.1) is None
