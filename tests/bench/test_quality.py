"""The comparison of formats, on a short text and the demo model."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from bench.__main__ import main
from bench.workload import read_tokens
from tests.bench.conftest import Bench
from tools.make_model import DEMO_MODEL

TEXT = "Two hens and three cats walk to the old mill, and 12 + 34 is 46. " * 4


def test_int8_is_compared_with_float32(
    tmp_path: Path,
    bench: Bench,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("NANO_THREADS", "1")
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    words = f"--mode quality --model {DEMO_MODEL} --texts {text} --context 32 --only int8"
    found = bench(words)
    tokens = read_tokens(DEMO_MODEL, [text])
    windows = torch.tensor(tokens[: found["tokens"]]).view(-1, 32)
    assert len(tokens) - found["tokens"] < 32
    oracle = AutoModelForCausalLM.from_pretrained(DEMO_MODEL).float().eval()
    with torch.inference_mode():
        expected = math.exp(oracle(windows, labels=windows).loss)
    reference, int8 = found["variants"]
    assert [reference["name"], int8["name"]] == ["float32", "int8"]
    assert reference["perplexity"] == pytest.approx(expected, rel=1e-4)
    low, high = reference["perplexity_interval"]
    assert low < expected < high
    assert [reference[name] for name in ("change", "divergence")] == [0, 0]
    assert reference["same_greedy_token"] == 1
    assert 0 < abs(int8["change"]) < 0.1
    assert 0 < int8["divergence"] < int8["divergence_p99"] < 0.1
    assert 0.8 < int8["same_greedy_token"] <= 1
    assert "compared with float32" in capsys.readouterr().out


def test_a_text_shorter_than_a_window_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("short")
    words = f"--mode quality --model {DEMO_MODEL} --texts {text} --out {tmp_path}/out"
    assert main(words.split()) == 1
    assert "--texts: fewer than 1024 tokens" in capsys.readouterr().err
