"""The rates that callers are held to, without a clock."""

from __future__ import annotations

import pytest

from frontend.callers.auth import _MAX_WAITING_REJECTIONS, _REJECTIONS_PER_SECOND
from frontend.callers.rates import CallerRates


def rejections() -> CallerRates:
    return CallerRates(_REJECTIONS_PER_SECOND, _MAX_WAITING_REJECTIONS / _REJECTIONS_PER_SECOND)


def seconds_of(count: int) -> list[float | None]:
    """The delays of `count` rejections at one time."""
    rates = rejections()
    return [rates.delay_s("a", 7.0) for _ in range(count)]


def test_a_flood_gets_fifty_rejections_a_second() -> None:
    assert seconds_of(150) == pytest.approx([*[0.0] * 50, *(i / 50 for i in range(1, 101))])


def test_a_caller_has_at_most_128_waiting_rejections() -> None:
    seconds = seconds_of(1000)
    assert sum(each is not None and each > 1e-6 for each in seconds) in (127, 128)
    assert seconds[-1] is None


def test_a_caller_that_was_quiet_does_not_wait() -> None:
    rates = rejections()
    assert [rates.delay_s("a", 7.0) for _ in range(200)][-1] is None
    assert rates.delay_s("a", 17.0) == 0.0


def test_one_caller_does_not_wait_for_anothers() -> None:
    rates = rejections()
    for _ in range(200):
        rates.delay_s("a", 7.0)
    assert rates.delay_s("b", 7.0) == 0.0


def test_the_number_of_remembered_callers_is_bounded() -> None:
    rates = CallerRates(10.0)
    assert all(rates.delay_s(str(number), 5.0) == 0.0 for number in range(1024))
    assert rates.delay_s("another", 5.0) is None
    assert rates.delay_s("another", 6.0) == 0.0
