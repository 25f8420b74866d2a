"""Latency against load: the arrivals, the goals, and a run until a server falls behind."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest

from bench.load_mode import Goals, arrivals, summarize_load
from bench.metrics import Trace
from tests.bench.test_stack import bench
from tests.client.fake_server import FakeServer


def test_arrivals_are_a_poisson_process_that_can_be_repeated() -> None:
    times = arrivals(50.0, 200.0, seed=3)
    assert times == sorted(arrivals(50.0, 200.0, seed=3))
    assert times != arrivals(50.0, 200.0, seed=4)
    assert 0.0 <= times[0] <= times[-1] < 200.0
    assert len(times) == pytest.approx(10_000, abs=5 * math.sqrt(10_000))
    gaps = [after - before for before, after in itertools.pairwise(times)]
    longer = sum(gap > 1 / 50 for gap in gaps) / len(gaps)
    assert longer == pytest.approx(math.exp(-1), abs=0.025)  # of a constant rate it would be 0


def test_only_requests_that_meet_both_goals_are_good() -> None:
    quick = Trace(4, sent=0.0, arrivals=[(1.0, 1), (1.2, 2)])
    late = Trace(4, sent=0.0, arrivals=[(3.0, 1), (3.2, 2)])
    halting = Trace(4, sent=0.0, arrivals=[(1.0, 1), (4.0, 2)])
    load = summarize_load([quick, late, halting], 2.0, Goals(ttft_s=2.0, itl_s=0.5))
    assert load.offered_rate == 1.5
    assert load.achieved_rate == 0.75  # of 4 seconds
    assert load.goodput == 0.25


def test_the_rate_rises_until_the_server_falls_behind(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.client.fake_server.ENDLESS_SEED", None)
    out = tmp_path / "load.json"
    server.service.tokens_per_chunk = 128
    words = ["--mode", "load", "--address", server.address, "--rate", "20", "--growth", "6"]
    done = bench(*words, "--seconds", "0.5", "--out", out, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    loads = found["loads"]
    assert len(loads) > 1
    assert [load["duration_s"] > 0.75 for load in loads] == [False] * (len(loads) - 1) + [True]
    assert loads[-1]["achieved_rate"] < loads[-1]["offered_rate"] / 1.5
    for load in loads:
        assert f"{load['offered_rate']:.2f}" in done.stdout
        assert 0 < load["ttft_p50_s"] <= load["ttft_p99_s"]
    assert (found["mode"], found["model"], found["goals"]["ttft_s"]) == ("load", "fake", 2.0)
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rate", "0"], "--rate: must be over 0"),
        (["--growth", "1"], "--growth: must be over 1"),
        (["--min-output", "200"], "--min-output"),
        (["--max-output", "9000"], "--max-output"),
    ],
)
def test_what_cannot_be_measured_is_a_plain_message(
    server: FakeServer, tmp_path: Path, flags: list[str], message: str
) -> None:
    done = bench("--mode", "load", "--address", server.address, *flags, cwd=tmp_path)
    assert done.returncode != 0
    assert message in done.stderr
    assert "Traceback" not in done.stderr
