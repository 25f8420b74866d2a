"""The whole benchmark on a real model: a private stack, then the same code in one process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.in_process import InProcessEngine
from bench.workload import Request, Shape, reference_workload, warm_up_request
from nano_vllm_grpc import EngineCapacity, ModelInfo, SamplingParams
from tests.waiting import WAIT_S
from tools.make_model import make_model

MAX_MODEL_LEN = 128


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    overrides = {"vocab_size": 1536, "max_position_embeddings": MAX_MODEL_LEN}
    return make_model(tmp_path_factory.mktemp("model") / "tiny", "tiny", overrides)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    # The model is too small for more. The stack's processes and this one read it.
    monkeypatch.setenv("NANO_THREADS", "1")


def served(max_num_seqs: int, num_blocks: int) -> ModelInfo:
    """The description that a server of the tiny model would give."""
    capacity = EngineCapacity(
        num_blocks=num_blocks,
        block_size=16,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=64,
        max_waiting=100,
        tensor_parallel_size=1,
    )
    return ModelInfo("tiny", MAX_MODEL_LEN, 1536, [0], SamplingParams(), capacity)


async def test_every_request_runs_to_its_length_within_the_servers_limits(
    tiny_model: Path,
) -> None:
    shape = Shape(num_seqs=9, min_input=10, max_input=80, min_output=3, max_output=20)
    requests = reference_workload(shape, 1536)
    received: list[int] = []

    engine = InProcessEngine(str(tiny_model), served(max_num_seqs=4, num_blocks=64))
    run = await engine.run(warm_up_request(shape, 1536), requests, received.append)

    assert [t.output_tokens for t in run.traces] == [r.output_len for r in requests]
    assert [t.prompt_tokens for t in run.traces] == [len(r.prompt) for r in requests]
    assert sum(received) == run.metrics.output_tokens
    assert run.stats is not None
    assert 1 < run.stats.mean_batch <= 4
    prefill = sum(len(r.prompt) for r in requests)
    decode = sum(r.output_len - 1 for r in requests)
    assert run.stats.step_tokens == prefill + decode  # the warm-up is not counted


async def test_prefix_cache_hits_are_counted(tiny_model: Path) -> None:
    prompt = list(range(40))
    engine = InProcessEngine(str(tiny_model), served(max_num_seqs=1, num_blocks=64))
    run = await engine.run(
        Request([1], 1, 0), [Request(prompt, 2, 0), Request(prompt, 2, 1)], lambda tokens: None
    )
    assert run.stats is not None
    assert run.stats.cached_prompt_tokens == 32


@pytest.mark.system
def test_bench_starts_a_private_stack_and_prints_the_ratio(
    tiny_model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "bench.json"
    flags = "--num-seqs 4 --min-input 8 --max-input 40 --min-output 4 --max-output 9 --in-process"
    done = subprocess.run(
        [sys.executable, "-m", "bench", "--model", tiny_model, "--out", out, *flags.split()],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "split ratio" in done.stdout
    found = json.loads(out.read_text())
    assert found["split_ratio"] == pytest.approx(
        found["output_tokens_per_s"] / found["in_process"]["output_tokens_per_s"]
    )
    assert found["output_tokens"] == found["in_process"]["output_tokens"]
    assert found["steps"] > 0  # the private stack's scheduler was asked
    assert found["prompt_tokens"] == found["in_process"]["prompt_tokens"]
