"""A rehearsal, on a CPU and in small sizes, of the measurements made on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from argparse import Namespace
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from bench.gpu import attention_speed, ceilings_speed, stack_speed
from bench.gpu import run as run_module
from bench.gpu.ceilings_speed import ModelSize, bound
from bench.gpu.records import Report, outcomes, read
from bench.gpu.run import MEASURE, RUNS
from bench.gpu.setup import Setup
from bench.gpu.steps import QWEN_0_6B, Heads, snapshot
from bench.workload import Shape, reference_workload
from tools.make_model import make_model


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gpu") / "tiny"
    return make_model(path, "tiny", {"num_hidden_layers": 1})


@pytest.mark.system
def test_measurements_run(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measurements that need no stack run in one process, so that torch is imported once."""
    files = [path for path in MEASURE if "stack" not in path]
    monkeypatch.setitem(RUNS, "rehearsal", tuple(files))
    monkeypatch.setattr(run_module, "groups", lambda files: [files])
    options = Namespace(rehearse=True, seed=1, peer=None, model=tiny_model, out=tmp_path)
    records = tmp_path / "rehearsal.jsonl"
    run_module.run("rehearsal", options, records)

    found = outcomes(records)
    assert set(found.values()) == {"passed", "skipped"}, list(read(records))
    figures = [record for record in read(records) if "unit" in record]
    names = [figure["name"] for figure in figures]
    assert len(names) == len(set(names))
    assert set(names) >= {
        "bandwidth",
        "matrix product",
        "decode attention, triton, tiny, 1 x 9",
        "decode attention, triton, tiny, 2 x 9",
        "decode attention, triton, tiny, 3 mixed",
        "decode attention, int8 cache, tiny, 2 x 9",
        "plain: o 16 x 256, 1 tokens",
        "int4, groups of 128: o 16 x 256, 3 tokens",
        "prompt attention, triton, tiny, 2 x 3 of 12",
        "step, 2 x 9: on the GPU",
        "step, 3 mixed: back to back",
        "step, 2 + 6 of a prompt: its kernels",
        "step, 1 x 6 tokens: launches",
    }
    assert [how for test, how in found.items() if "fa3" in test]


def test_rates_are_of_the_bytes_and_operations(tiny_model: Path) -> None:
    heads = Heads(4, 2, 16)
    load = attention_speed.make_load(Setup(tiny_model, 1, rehearse=True), "triton", heads, [20, 7])
    size = (20 + 7) * 2 * 2 * 16 * 4  # tokens, keys and values, KV heads, head_dim, bytes
    assert load.rate(lambda cache: None) == pytest.approx(size / 1e-3 / 1e9)
    pairs = 7 + 8 + 9  # seen by the last three of nine
    assert ceilings_speed.attention_flops(heads, 3, 9) == 2 * 2 * 4 * 16 * pairs


def test_the_bound_of_the_workload() -> None:
    """As worked out by hand for an H200 and Qwen3-0.6B: 13.9 TB of keys and values, 1.2 GB of
    weights a step, and 145,000 prompt tokens."""
    size = ModelSize(28, QWEN_0_6B, body=440_467_456, head=151_936 * 1024, itemsize=2)
    assert size.token_bytes == 114_688
    assert bound(size, Shape(), 4300, 790) == pytest.approx(35_600, rel=0.03)
    assert bound(size, Shape(), 8600, 1580) == pytest.approx(2 * bound(size, Shape(), 4300, 790))


def test_the_workload_halfway() -> None:
    contexts = snapshot(Shape())
    assert contexts == snapshot(Shape())
    requests = reference_workload(Shape(), 1)
    assert all(
        len(request.prompt) < context <= len(request.prompt) + request.output_len
        for request, context in zip(requests, contexts, strict=True)
    )
    assert 750 < sum(contexts) / len(contexts) < 950


# Packages that a machine with a GPU need not have.
UNUSED = {"opentelemetry-sdk", "xgrammar"}


@pytest.mark.system
def test_the_smoke_runs_without_unused_packages(tmp_path: Path) -> None:
    """Runs the program itself, with a real stack at the end."""
    for module, distributions in packages_distributions().items():
        if UNUSED & {*distributions}:
            (tmp_path / f"{module}.py").write_text("raise ModuleNotFoundError(__name__)")
    done = subprocess.run(
        [sys.executable, "-m", "bench.gpu", "smoke", "--rehearse", "--out", tmp_path / "out"],
        env=os.environ | {"NANO_THREADS": "1", "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=550,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    *_, stack, stream, verdict, _ = done.stdout.splitlines()
    assert [line[:10] for line in (stack, stream)] == ["stack     ", "one stream"]
    assert verdict == "smoke: 20 passed, 3 skipped; a rehearsal: no figure means anything"
    about, *records = read(tmp_path / "out" / "smoke.jsonl")
    assert about["rehearsal"] is True
    skipped = [each["message"] for each in records if each.get("outcome") == "skipped"]
    assert "no peer, see --peer" in skipped
    for name in ("graphs against eager", "model against transformers", "demo against transformers"):
        (figure,) = (each for each in records if each.get("name") == f"{name}: equal tokens")
        assert figure["ratio"] == 1
    details = {
        each["name"]: each["value"] for each in records if "name" in each and "unit" not in each
    }
    rounds = [details[f"round {number}"] for number in range(2)]
    assert [each["cached_prompt_tokens"] for each in rounds] == [0, 0]
    for process in ("client", "frontend", "scheduler_svc", "worker_svc"):
        used = [found["cpu_s"][process] for found in (*rounds, details["one stream"])]
        assert min(used) >= 0
        assert sum(used) > 0
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["smoke.jsonl"]


@pytest.mark.parametrize("name", ["nano-vLLM", "vLLM"])
def test_the_peer_runs_the_same_workload(
    tmp_path: Path, tiny_model: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package stands in for the peer. nano-vLLM's is next to a module `bench`, which it has,
    too."""
    folder, peer = tmp_path / "packages", tmp_path / "vllm"
    folder.mkdir()
    if name == "vLLM":
        monkeypatch.setenv("PYTHONPATH", str(folder))
    else:
        (folder / "bench.py").write_text("raise AssertionError")
        peer = folder
    (folder / "nanovllm.py").write_text(STAND_IN)
    (folder / "vllm.py").write_text("from nanovllm import LLM, SamplingParams")
    report = Report(tmp_path / "records", "peer")
    report.figure("stack", 300.0, "tokens/s")
    stack_speed.measure_peer(Setup(tiny_model, 1, peer=peer, rehearse=True), report)
    *_, last = read(tmp_path / "records")
    assert len(report.value("rounds")) == 2
    assert last["name"] == f"stack / {name}"
    assert last["against"] == report.value(name)


STAND_IN = """
from collections import namedtuple
fields = "temperature max_tokens ignore_eos detokenize"
SamplingParams = namedtuple("SamplingParams", fields, defaults=[1, 64, 0, 1])
class LLM:
    def __init__(self, model, enforce_eager, max_model_len, **of_vllm):
        self.of_vllm = of_vllm
        self.calls = []
    def generate(self, prompts, params, use_tqdm=True):
        self.calls.append(prompts)
        if len(self.calls) == 1:
            return
        assert len(prompts) == 256 and sum(each.max_tokens for each in params) == 133966
        assert all(each.ignore_eos and each.temperature == 0.6 for each in params)
        assert prompts not in self.calls[:-1]
        texts = [each["prompt_token_ids"] for each in prompts] if self.of_vllm else prompts
        assert all(isinstance(token, int) for text in texts for token in text)
"""
