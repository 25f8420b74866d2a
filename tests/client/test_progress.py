from __future__ import annotations

import pytest

from nano_vllm_grpc.progress import PhaseRates


def test_each_phase_has_its_own_clock() -> None:
    now = 0.0
    rates = PhaseRates(lambda: now)
    assert (rates.prefill, rates.decode) == (0.0, 0.0)

    rates.sent()
    rates.sent()
    now = 2.0  # both prompts are computed until here
    rates.first_token(100)
    now = 3.0
    rates.first_token(50)
    assert rates.prefill == pytest.approx(150 / 3)

    now = 5.0  # both decode, since 2.0 and 3.0
    rates.decoded(6)
    assert rates.decode == pytest.approx(6 / 3)

    rates.ended(had_tokens=True)
    rates.ended(had_tokens=True)
    now = 100.0  # idle: neither clock runs
    rates.sent()
    assert rates.decode == pytest.approx(2.0)
    assert rates.prefill == pytest.approx(50.0)


def test_a_request_that_fails_in_prefill_stops_its_clock() -> None:
    now = 0.0
    rates = PhaseRates(lambda: now)
    rates.sent()
    rates.sent()
    now = 1.0
    rates.ended(had_tokens=False)
    rates.first_token(10)
    now = 9.0
    rates.decoded(4)
    assert rates.prefill == pytest.approx(10.0)
    assert rates.decode == pytest.approx(0.5)
