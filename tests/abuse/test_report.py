"""Whether a campaign of attacks would notice harm."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from tests.abuse import figures
from tests.abuse.attack import Attack, Gains, Interface, Target
from tests.abuse.figures import NOT_SERVING, Figures, Recorder
from tests.abuse.report import Report, Result, Round

CALM, SLOW = Figures(gap_p99_ms=10.0), Figures(gap_p99_ms=30.0)


async def nothing(_: Target) -> None: ...


def round_of(attack: Figures, control: Figures = CALM, died: str = "") -> Round:
    return Round(CALM, attack, control, 0.5, 0.1, [died] if died else [], Gains())


def harmed(kind: str) -> Round:
    return round_of(replace(CALM, harm=Counter({kind: 3})))


def failures(
    *rounds: Round, factor: float | None = None, kills: str = "", interface: Interface = "grpc"
) -> list[str]:
    result = Result(Attack("name", nothing, kills, interface), list(rounds))
    return Report(1.0, len(rounds), [result]).failures(factor)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Makes the last entry the time."""
    times = [100.0]
    monkeypatch.setattr(figures.time, "monotonic", lambda: times[-1])
    return times


def test_health_that_serves_while_nothing_flows_lies(clock: list[float]) -> None:
    recorder = Recorder()
    recorder.tokens(1, 0.1)
    clock.append(102.0)
    recorder.health("frontend", 0.01, serving=True)
    clock.append(104.0)
    recorder.health("scheduler", 0.01, serving=True)
    assert not recorder.end().harm
    for _ in range(100):  # fewer answers, and the machine was silent, not the stack
        recorder.health("frontend", 0.01, serving=True)
    assert recorder.end().harm == {"lies": 1}


def test_health_that_does_not_serve_while_tokens_flow_lies(clock: list[float]) -> None:
    recorder = Recorder()
    recorder.health("frontend", 0.01, serving=False)  # tokens may still be on their way
    clock.append(101.0)
    recorder.health("frontend", 0.01, serving=False)  # there were none for a second
    assert recorder.end().harm == {NOT_SERVING: 2}
    recorder.tokens(1, 0.1)
    recorder.health("frontend", 0.01, serving=False)
    assert recorder.end().harm == {NOT_SERVING: 1, "lies": 1}


def test_figures_are_of_one_window(clock: list[float]) -> None:
    recorder = Recorder()
    recorder.tokens(3, None)
    for milliseconds in range(1, 101):
        recorder.tokens(1, milliseconds / 1e3)
    recorder.health("scheduler", 0.02, serving=True)
    recorder.connect(0.03, answered=False)
    found = recorder.end(stuck=2)
    assert (found.tokens, found.gap_p99_ms, found.health_ms) == (103, 99.0, 30.0)
    assert found.harm == {"no connection": 1, "stuck": 2}
    assert recorder.end() == Figures()


def test_harm_is_a_failure() -> None:
    assert not failures(round_of(CALM))
    assert failures(round_of(CALM), harmed("CANCELLED")) == ["name: 3 × CANCELLED"]
    assert failures(round_of(CALM, died="frontend-0")) == ["name: 1 × frontend-0"]


def test_a_service_may_say_that_it_does_not_serve_while_it_is_dead() -> None:
    assert failures(harmed(NOT_SERVING))
    assert not failures(harmed(NOT_SERVING), kills="worker")


def test_clients_that_cannot_be_told_apart_may_be_refused() -> None:
    assert failures(harmed("RESOURCE_EXHAUSTED"))
    assert not failures(harmed("RESOURCE_EXHAUSTED"), interface="http")


def test_the_median_factor_is_against_the_control() -> None:
    rounds = round_of(SLOW), round_of(SLOW), round_of(CALM)
    assert failures(*rounds, factor=2.0)
    assert not failures(*rounds, factor=4.0)
    assert not failures(*(replace(each, control=SLOW) for each in rounds), factor=2.0)
