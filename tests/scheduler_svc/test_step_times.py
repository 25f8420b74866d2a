"""Times of steps of sizes that never ran, and of prompts."""

from __future__ import annotations

import pytest

from scheduler_svc.core.planning.step_times import StepTimes
from scheduler_svc.core.sampling import SamplingParams
from scheduler_svc.core.sequence import Row, Sequence
from scheduler_svc.core.step import Step, StepTiming

SEQ = Sequence((0, 1), [1, 2], SamplingParams(1))


def measure(
    times: StepTimes, rows: int, seconds: float, gap_s: float = 0.0, drafts: int = 0
) -> None:
    step = Step(1, [Row(SEQ, 1, 1, True)] * rows, num_decodes=rows, num_drafts=drafts)
    times.step_answered(step, StepTiming(seconds, gap_s, 0.0))


def known(**seconds: float) -> StepTimes:
    """Times that know the seconds of these numbers of rows."""
    times = StepTimes()
    for rows, each in seconds.items():
        measure(times, int(rows[1:]), each)
    return times


@pytest.mark.parametrize("rows", [1, 4, 9, 16, 24, 64, 65, 100, 128, 129, 1000])
def test_a_line_is_continued(rows: int) -> None:
    times = known(_8=10 + 8, _16=10 + 16, _64=10 + 64)
    assert times.seconds(rows) == pytest.approx(10 + rows)


def test_one_size_says_little_about_others() -> None:
    times = known(_8=1.0)
    assert 0.5 < times.seconds(4) < 1 < times.seconds(16) < 2
    assert times.seconds(16) < times.seconds(160) < 20


def test_near_sizes_say_little_about_far_ones() -> None:
    """Their times differ by chance."""
    assert known(_63=1.0, _64=1.1).seconds(128) < 2 * 1.1
    assert known(_63=1.1, _64=1.0).seconds(128) > 1.0


def test_more_rows_never_take_less_time_nor_more_than_one_step_after_another() -> None:
    assert known(_8=1.0, _32=0.5).seconds(64) == pytest.approx(0.5)
    assert known(_8=1.0, _32=0.5).seconds_without(8) == pytest.approx(0.5)
    assert known(_8=1.0, _16=4.0).seconds(32) == pytest.approx(8.0)


def test_steps_grow_in_small_increments() -> None:
    times = known(_1=1.0, _8=1.0)
    assert times.max_drafts(8, 100) == 8
    assert times.max_drafts(2, 100) == 14
    assert times.max_drafts(8, 5) == 5


def test_few_free_rows_are_not_worth_a_guess() -> None:
    assert known(_8=1.0, _16=1.0).max_drafts(60, 4) == 0


def test_a_first_wait_counts_in_full_unless_the_machine_paused() -> None:
    times = known(_1=1.0)
    measure(times, 2, 1.0, gap_s=0.5, drafts=1)
    assert times.wait_s == pytest.approx(0.5)
    measure(times, 2, 1.0, gap_s=100.0, drafts=1)
    assert times.wait_s < 2


def test_a_step_that_was_waited_for_tells_only_that_others_take_no_longer() -> None:
    times = known(_1=1.0, _2=1.0)
    measure(times, 1, 3.0, gap_s=0.5)
    assert times.seconds(1) == pytest.approx(1.0)
    for _ in range(50):
        measure(times, 1, 0.2, gap_s=0.5)
    assert times.seconds(1) == pytest.approx(0.2, rel=0.1)


def test_a_pause_of_the_machine_is_not_taken_for_the_time_of_a_number_of_rows() -> None:
    assert known(_8=1.0, _12=60.0).seconds(12) < 5.0


def test_drafts_are_tried_again_where_they_were_measured_on_a_busy_machine() -> None:
    times = known(_1=1.0)
    measure(times, 8, 100.0, drafts=7)
    measure(times, 8, 100.0, drafts=7)
    measure(times, 1, 1.0)
    assert not times.max_drafts(1, 7)
    for _ in range(1000):
        measure(times, 1, 1.0)
    assert not times.max_drafts(1, 7)
    for _ in range(100):
        measure(times, 1, 1.0)
    assert times.max_drafts(1, 100) == 1


def measure_prompt(times: StepTimes, seconds: float, context: int, tokens: int, rows: int) -> Step:
    """Tells of a step with these decodes, and with tokens of a prompt up to `context`."""
    decodes = [Row(SEQ, 1, 1, True)] * rows
    prompt = Row(SEQ, context - tokens, tokens, True)
    step = Step(1, [*decodes, prompt], num_decodes=rows)
    times.step_answered(step, StepTiming(seconds, 0.0, 0.0))
    return step


def test_a_prompts_time_is_what_the_step_takes_beyond_its_decodes() -> None:
    times = known(_4=1.0)
    step = measure_prompt(times, 3.0, context=1000, tokens=200, rows=4)
    assert times.prompt_token_s() == pytest.approx(0.01)
    assert times.seconds_of(step) == pytest.approx(3.0)
    assert times.seconds(4) == pytest.approx(1.0)


def test_a_context_that_was_not_measured_has_the_time_of_a_shorter_one_or_twice_that() -> None:
    times = StepTimes()
    assert times.prompt_token_s() == times.max_prompt_token_s(1000) == 0
    measure_prompt(times, 1.0, context=1000, tokens=100, rows=0)
    measure_prompt(times, 3.0, context=10_000, tokens=100, rows=0)
    assert times.prompt_token_s(1000) == times.max_prompt_token_s(1000) == pytest.approx(0.01)
    assert times.prompt_token_s(5000) == pytest.approx(0.01)
    assert times.max_prompt_token_s(5000) == pytest.approx(0.02)
    assert times.prompt_token_s(100_000) == pytest.approx(0.03)
    assert times.prompt_token_s(10) == pytest.approx(0.01)


def test_no_number_of_rows_is_guessed_beyond_twice_the_largest_one() -> None:
    times = StepTimes()
    assert times.seconds(1) == 0
    assert not times.may_guess(1)
    measure(times, 8, 1.0)
    assert times.may_guess(1)
    assert times.may_guess(15)
    assert not times.may_guess(16)
