"""The scheduler and a real model in one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.in_process import InProcessEngine
from bench.workload import Shape, reference_workload, warm_up_request
from nano_vllm_grpc import EngineCapacity, ModelInfo, SamplingParams
from tools.make_model import make_model

MAX_NUM_SEQS = 4


async def test_every_request_runs_to_its_length_within_the_servers_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NANO_THREADS", "1")
    overrides = {"vocab_size": 1536, "max_position_embeddings": 128}
    model = make_model(tmp_path / "tiny", "tiny", overrides)
    capacity = EngineCapacity(
        num_blocks=64,
        block_size=16,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=64,
        max_waiting=100,
        tensor_parallel_size=1,
    )
    info = ModelInfo("tiny", 128, 1536, [0], SamplingParams(), capacity)
    engine = InProcessEngine(str(model), info)
    shape = Shape(num_seqs=9, min_input=10, max_input=80, min_output=3, max_output=20)
    requests = reference_workload(shape, 1536)
    run = await engine.run(warm_up_request(shape, 1536), requests)

    assert [t.output_tokens for t in run.traces] == [r.output_len for r in requests]
    assert [t.prompt_tokens for t in run.traces] == [len(r.prompt) for r in requests]
    assert run.stats is not None
    assert 1 < run.stats.mean_batch <= MAX_NUM_SEQS
    prefill = sum(len(r.prompt) for r in requests)
    decode = sum(r.output_len - 1 for r in requests)
    assert run.stats.step_tokens == prefill + decode  # the warm-up is not counted
