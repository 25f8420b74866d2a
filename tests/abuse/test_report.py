"""Whether a campaign of attacks would notice harm."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.abuse import figures
from tests.abuse.attack import Gains
from tests.abuse.figures import Figures, Recorder
from tests.abuse.report import Report, Result, Round

CALM = Figures(gap_p99_ms=10.0)


def round_of(attack: Figures, **changes: Any) -> Round:
    usual = {"frontend": 100.0}
    calm = Round(
        none=CALM,
        attack=attack,
        control=CALM,
        attackers_cores=0.5,
        extra_cores=0.1,
        memory_before_mb=usual,
        memory_peak_mb=usual,
        memory_after_mb=usual,
        died=[],
        gains=Gains(),
    )
    return replace(calm, **changes)


def report_of(*rounds: Round, kills: bool = False, anonymous: bool = False) -> Report:
    return Report(1.0, len(rounds), [Result("name", "about", kills, anonymous, list(rounds))])


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Makes the last entry the time."""
    times = [100.0]
    monkeypatch.setattr(figures.time, "monotonic", lambda: times[-1])
    return times


def test_health_that_serves_while_nothing_flows_lies(clock: list[float]) -> None:
    recorder = Recorder()
    recorder.token(0.1, 1, first=False)
    clock.append(102.0)
    recorder.health("frontend", 0.01, serving=True)
    clock.append(104.0)
    recorder.health("scheduler", 0.01, serving=True)
    assert not recorder.end().lies
    for _ in range(100):  # fewer answers, and the machine was silent, not the stack
        recorder.health("frontend", 0.01, serving=True)
    assert recorder.end().lies == 1


def test_health_that_does_not_serve_while_tokens_flow_lies(clock: list[float]) -> None:
    recorder = Recorder()
    recorder.health("frontend", 0.01, serving=False)  # tokens may still be on their way
    clock.append(101.0)
    recorder.health("frontend", 0.01, serving=False)  # there were none for a second
    assert not recorder.end().lies
    recorder.token(0.1, 1, first=False)
    recorder.health("frontend", 0.01, serving=False)
    found = recorder.end()
    assert (found.lies, found.not_serving) == (1, 1)


@pytest.mark.parametrize(
    "harmed",
    [
        round_of(replace(CALM, errors={"CANCELLED": 1})),
        round_of(replace(CALM, wrong=1)),
        round_of(replace(CALM, stuck=1)),
        round_of(replace(CALM, lies=1)),
        round_of(replace(CALM, no_connection=1)),
        round_of(replace(CALM, not_serving=1)),
        round_of(CALM, died=["frontend-0 died"]),
    ],
    ids=["error", "wrong", "stuck", "lie", "no connection", "not serving", "died"],
)
def test_harm_is_a_failure(harmed: Round) -> None:
    assert len(report_of(round_of(CALM), harmed).failures(None)) == 1
    assert not report_of(round_of(CALM)).failures(None)


def test_a_service_may_say_that_it_does_not_serve_while_it_is_dead() -> None:
    dead = round_of(replace(CALM, not_serving=1))
    assert not report_of(dead, kills=True).failures(None)


def test_clients_that_cannot_be_told_apart_may_be_refused() -> None:
    refused = round_of(replace(CALM, errors={"RESOURCE_EXHAUSTED": 3}))
    assert report_of(refused).failures(None)
    assert not report_of(refused, anonymous=True).failures(None)


def test_the_median_factor_is_against_the_control() -> None:
    slow = replace(CALM, gap_p99_ms=30.0)
    rounds = round_of(slow), round_of(slow), round_of(CALM)
    assert report_of(*rounds).failures(2.0)
    assert not report_of(*rounds).failures(4.0)
    assert not report_of(*(replace(each, control=slow) for each in rounds)).failures(2.0)


def test_a_saved_report_has_what_attackers_gained(tmp_path: Path) -> None:
    gains = Gains(Counter(OK=3), Counter(requests=4), 5)
    report_of(round_of(CALM, gains=gains)).save(tmp_path / "report.json")
    (result,) = json.loads((tmp_path / "report.json").read_text())["results"]
    saved = result["rounds"][0]["gains"]
    assert saved == {"answers": {"OK": 3}, "sent": {"requests": 4}, "tokens": 5}
    assert result["p99_factor"] == 1.0
