"""When a failed call is repeated, on a fake clock."""

from __future__ import annotations

import math
from types import SimpleNamespace

import grpc
import pytest

from nano_vllm_grpc import LLMError, QueueFullError, UnavailableError
from nano_vllm_grpc.retry import Retries


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def wait_out(self, retries: Retries, error: LLMError, *, reached: bool = True) -> list[float]:
        """Waits out each delay until the error is raised, and returns them all."""
        delays: list[float] = []
        try:
            while True:
                delays.append(retries.next_delay(error, reached=reached))
                self.now += delays[-1]
        except type(error):
            return delays


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("nano_vllm_grpc.retry.time", SimpleNamespace(monotonic=clock.monotonic))
    return clock


def unavailable(retry_after_s: float | None = None) -> UnavailableError:
    return UnavailableError("away", grpc.StatusCode.UNAVAILABLE, retry_after_s)


def test_waits_grow_to_a_limit_and_end(clock: Clock) -> None:
    delays = clock.wait_out(Retries(5000, math.inf), unavailable())
    for number, delay in enumerate(delays):
        longest = min(0.02 * 2 ** min(number, 10), 2)
        assert longest / 2 <= delay <= longest
    assert len({round(delay, 6) for delay in delays[10:]}) > 100  # jitter
    assert 4998 < sum(delays) <= 5000


def test_time_before_the_first_failure_does_not_count(clock: Clock) -> None:
    retries = Retries(10, math.inf)
    clock.now += 100
    assert 8 < sum(clock.wait_out(retries, unavailable())) <= 10


def test_progress_begins_a_new_wait(clock: Clock) -> None:
    retries = Retries(10, math.inf)
    clock.wait_out(retries, unavailable())
    retries.progressed()
    delays = clock.wait_out(retries, unavailable())
    assert delays[0] <= 0.02
    assert 8 < sum(delays) <= 10


@pytest.mark.parametrize("kind", ["full", "away"])
def test_no_wait_is_shorter_than_the_server_said(clock: Clock, kind: str) -> None:
    error: LLMError = unavailable(3) if kind == "away" else QueueFullError("full", 3)
    delays = clock.wait_out(Retries(60, math.inf), error)
    assert all(3 <= delay <= 3.75 for delay in delays)
    assert 16 <= len(delays) <= 20


def test_a_server_that_never_answered_gets_little_time(clock: Clock) -> None:
    assert sum(clock.wait_out(Retries(300, math.inf), unavailable(), reached=False)) <= 5


def test_no_wait_goes_past_the_deadline(clock: Clock) -> None:
    delays = clock.wait_out(Retries(300, clock.now + 1), unavailable())
    assert delays
    assert sum(delays) <= 1
