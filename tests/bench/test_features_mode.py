"""The benchmark of sampling features on a private stack, at a tiny size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from bench.features_mode import FEATURES

ROOT = Path(__file__).parents[2]


def test_every_feature_has_its_figures(tmp_path: Path) -> None:
    out = tmp_path / "features.json"
    sizes = ["--streams", "2", "--tokens", "4", "--pairs", "1", "--out", str(out)]
    done = subprocess.run(
        [sys.executable, "-m", "bench", "--mode", "features", *sizes],
        capture_output=True,
        text=True,
        timeout=110,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert [cost["feature"] for cost in found["costs"]] == list(FEATURES)
    for cost in found["costs"]:
        assert cost["feature"] in done.stdout
        assert cost["tokens_per_s"] > 0
        assert min(cost["speed"], cost["neighbours_gap_p50"], cost["neighbours_gap_p99"]) > 0
    assert (found["streams"], found["tokens"], found["pairs"]) == (2, 4, 1)
