"""The comparison of formats, on a few sums and texts of the demo model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.quality.__main__ import main
from tools.make_model import DEMO_MODEL


def test_int8_is_compared_with_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("NANO_THREADS", "1")
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
    assert "compared with float32" in capsys.readouterr().out
