"""Latency against load: the arrivals, the goals, and a run until a server falls behind."""

from __future__ import annotations

import itertools
import json
import math
import time
from pathlib import Path

import pytest

from bench import load_mode
from bench.load_mode import Goals, arrivals, summarize_load
from bench.metrics import Trace
from bench.workload import Request
from nano_vllm_grpc import AsyncLLM
from tests.bench.command import status
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


async def test_each_request_is_sent_when_it_is_due(server: FakeServer) -> None:
    requests = [Request([5, 6], 3, seed) for seed in range(3)]
    before = time.perf_counter()
    async with AsyncLLM(server.address) as llm:
        traces = await load_mode._send(llm, [0.0, 0.01, 0.02], requests)
    assert [trace.output_tokens for trace in traces] == [3, 3, 3]
    assert [each.sampling.seed for each in server.service.requests] == [0, 1, 2]
    first, second, third = (trace.sent for trace in traces)
    assert before <= first
    assert (second - first, third - first) == pytest.approx((0.01, 0.02))
    assert all(trace.arrivals[0][0] >= trace.sent for trace in traces)


def test_the_rate_rises_until_the_server_falls_behind(
    server: FakeServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A server that answers 100 requests/s, one after another, in a time without noise."""

    async def send(llm: AsyncLLM, due: list[float], requests: list[Request]) -> list[Trace]:
        traces, free = [], 0.0
        for when, request in zip(due, requests, strict=True):
            free = max(free, when) + 0.01
            arrivals = [(free, 1), (free, request.output_len - 1)]
            traces.append(Trace(len(request.prompt), sent=when, arrivals=arrivals))
        return traces

    monkeypatch.setattr(load_mode, "_send", send)
    monkeypatch.setattr("tests.client.fake_server.ENDLESS_SEED", None)
    out = tmp_path / "load.json"
    words = ["--address", server.address, "--rate", "20", "--growth", "2", "--seconds", "10"]
    assert load_mode.main([*words, "--out", str(out)]) == 0
    found, said = json.loads(out.read_text()), capsys.readouterr().out
    loads = found["loads"]
    # At 160 requests/s the last is answered 16 s after the first came, more than 1.5 times 10 s.
    sent = [len(arrivals(rate, 10.0, seed)) for seed, rate in enumerate((20, 40, 80, 160))]
    assert [load["offered_rate"] for load in loads] == [count / 10 for count in sent]
    assert [load["duration_s"] > 15 for load in loads] == [False, False, False, True]
    assert loads[-1]["achieved_rate"] == pytest.approx(100, rel=0.01)
    for load in loads:
        assert f"{load['offered_rate']:.2f}" in said
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
    server: FakeServer, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert status(load_mode.main, ["--address", server.address, *flags]) != 0
    assert message in capsys.readouterr().err
