"""The comparison of formats, on a few sums and texts of the demo model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bench.quality import intervals
from bench.quality.__main__ import main
from tools.make_model import DEMO_MODEL


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("NANO_THREADS", "1")


def test_int8_is_compared_with_float32(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "quality.json"
    counts = ["--sums", "12", "--sums-after-chats", "2", "--texts", "3"]
    assert main(["--model", str(DEMO_MODEL), "--only", "int8", "--out", str(out), *counts]) == 0

    reference, int8 = json.loads(out.read_text())["variants"]
    assert [reference["name"], int8["name"]] == ["float32", "int8"]
    assert reference["sums"]["share"] == int8["sums"]["share"] == 1
    assert [int8["sums"]["count"], int8["sums_after_chats"]["count"]] == [12, 2]
    assert reference["divergence"]["mean"] == 0
    assert reference["divergence"]["same_greedy_token"] == 1
    assert 0 < int8["divergence"]["mean"] < 0.01
    assert 0.9 < int8["divergence"]["same_greedy_token"] <= 1
    rows = [line.split(" | ")[0] for line in capsys.readouterr().out.splitlines()]
    assert [row for row in rows if row in ("| float32", "| int8")] == ["| float32", "| int8"]


def answers(both: int, first: int, second: int, neither: int) -> tuple[np.ndarray, np.ndarray]:
    """Answers to the same questions, right or not, by how many each of two got right."""
    counts = [both, first, second, neither]
    return np.repeat([True, True, False, False], counts), np.repeat(
        [True, False, True, False], counts
    )


def test_difference_of_paired_shares_is_the_published_one() -> None:
    # Fagerland, Lydersen, Laake: "Recommended tests and confidence intervals for paired binomial
    # proportions" (2014), airway hyper-responsiveness.
    found = intervals.paired_difference(*answers(1, 1, 7, 12))
    assert found == pytest.approx((-0.507, -0.026), abs=5e-4)


def test_difference_turns_its_sign_with_the_order() -> None:
    first, second = answers(59, 6, 16, 80)
    low, high = intervals.paired_difference(first, second)
    assert intervals.paired_difference(second, first) == pytest.approx((-high, -low))


def test_difference_has_a_width_where_no_answers_differ() -> None:
    low, high = intervals.paired_difference(*answers(1000, 0, 0, 0))
    assert -0.005 < low < 0 < high < 0.005


@pytest.mark.parametrize("share", [0.3, 0.98])
def test_mean_over_texts_is_covered(share: float) -> None:
    rng = np.random.default_rng(3)
    covered = 0
    for seed in range(200):
        counts = rng.integers(20, 60, size=80)
        sums = rng.binomial(counts, share).astype(float)
        low, high = intervals.mean(sums, counts, seed)
        covered += low <= share <= high
    assert covered / 200 == pytest.approx(0.95, abs=0.05)
