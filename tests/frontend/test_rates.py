"""The rates that callers are held to, without a clock."""

from __future__ import annotations

import pytest

from frontend.callers.auth import _MAX_WAITING_REFUSALS, _REFUSALS_PER_SECOND
from frontend.callers.rates import CallerRates


def refusals() -> CallerRates:
    return CallerRates(_REFUSALS_PER_SECOND, _MAX_WAITING_REFUSALS / _REFUSALS_PER_SECOND)


def seconds_of(count: int) -> list[float | None]:
    """How long each of so many refusals at once waits."""
    rates = refusals()
    return [rates.delay_s("a", 7.0) for _ in range(count)]


def test_a_burst_is_answered_at_once() -> None:
    assert seconds_of(50) == pytest.approx([0.0] * 50)


def test_a_flood_is_answered_fifty_a_second() -> None:
    assert seconds_of(150)[50:] == pytest.approx([each / 50 for each in range(1, 101)])


def test_no_more_wait_than_a_caller_may_have_waiting() -> None:
    seconds = seconds_of(1000)
    assert sum(each is not None and each > 1e-6 for each in seconds) in (127, 128)
    assert seconds[-1] is None


def test_a_caller_that_was_quiet_waits_no_longer() -> None:
    rates = refusals()
    assert [rates.delay_s("a", 7.0) for _ in range(200)][-1] is None
    assert rates.delay_s("a", 17.0) == 0.0


def test_one_caller_does_not_wait_for_anothers() -> None:
    rates = refusals()
    for _ in range(200):
        rates.delay_s("a", 7.0)
    assert rates.delay_s("b", 7.0) == 0.0


def test_only_so_many_callers_are_remembered() -> None:
    rates = CallerRates(10.0)
    assert all(rates.delay_s(str(number), 5.0) == 0.0 for number in range(1024))
    assert rates.delay_s("another", 5.0) is None
    assert rates.delay_s("another", 6.0) == 0.0
