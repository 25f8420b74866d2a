"""`bench --mode routing` on two engines, for a moment."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.routing_mode import main, make_workload, parse_args

SMALL = (
    *("--engines", "2", "--seconds", "2", "--rate", "12", "--pause", "0.4"),
    *("--systems", "3", "--system-words", "100"),
)


@pytest.mark.system
def test_every_way_serves_the_same_requests(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    quick = ["--step-us", "2000", "--token-us", "10", "--no-gateway", "--out", str(out)]
    assert main([*SMALL, *quick]) == 0
    ways = {each["way"]: each for each in json.loads(out.read_text())["ways"]}
    assert len(ways) == 4
    assert len({each["requests"] for each in ways.values()}) == 1
    for name, way in ways.items():
        assert 0 < way["hit_rate"] < 1, name
        assert 0 < way["ttft_p50_s"] <= way["ttft_p99_s"], name
    assert ways["one engine as large as all"]["share_of_busiest"] == 1
    assert 0.5 <= ways["random"]["share_of_busiest"] < 1


def test_the_workload_depends_on_the_seed_alone() -> None:
    options = parse_args(SMALL)
    assert make_workload(options) == make_workload(options)
    other = parse_args([*SMALL, "--seed", "1"])
    assert make_workload(options) != make_workload(other)
