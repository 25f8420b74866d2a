"""Final hidden states of whole prompts, against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from shared.pb.worker_pb2 import Pooling
from tests.worker_svc.harness import Batch, batch_for, i4, save_model, worker_settings
from tests.worker_svc.interpreted import InterpretedPlatform
from worker_svc.devices.cpu import CpuPlatform
from worker_svc.kernels import cpu_features
from worker_svc.model_runner import ModelRunner
from worker_svc.step.decode import decode_step

NUM_BLOCKS = 64
YES, NO = 7, 40
# Inputs of products with bfloat16 are rounded, and oneDNN, which AMX uses, rounds results.
ROUNDS = cpu_features.has("avx512bf16")
PROMPTS = [[5, 9, 2, 7, 7, 1, 30, 4, 8], [3], [11, 12, 13, 14]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("model")
    return path, save_model(path)


def expected(oracle: Any, prompt: list[int]) -> NDArray[np.float32]:
    """The hidden states after the last norm, [N, size]."""
    with torch.inference_mode():
        states = oracle.model(torch.tensor([prompt])).last_hidden_state[0]
    found: NDArray[np.float32] = states.numpy()
    return found


def pooling(rows: list[int], sums: list[int], scores: dict[int, tuple[int, int]]) -> Pooling:
    """`scores`: the tokens of those of the rows that have a score."""
    ids = [scores.get(row, (-1, -1)) for row in rows]
    yes_ids, no_ids = i4([yes for yes, _ in ids]), i4([no for _, no in ids])
    return Pooling(rows=i4(rows), sums=bytes(sums), yes_ids=yes_ids, no_ids=no_ids)


@pytest.mark.parametrize("platform", [CpuPlatform, InterpretedPlatform])
def test_hidden_states_of_chunks_beside_others(
    model: tuple[Path, Any], platform: type[CpuPlatform]
) -> None:
    """The first prompt comes in two chunks, of which sums are requested; the second is a single
    token, which a graph could run; the third is not pooled."""
    path, oracle = model
    settings = worker_settings(path, block_size=16, max_num_seqs=4, attention="auto")
    runner = ModelRunner(settings, platform(settings))
    runner.configure(1, NUM_BLOCKS)
    batch, previous = batch_for(runner, NUM_BLOCKS), None
    found = []
    long, short, other = PROMPTS
    for chunks, rows, sums in (
        ([(0, long[:6]), (2, other)], [0], [1]),
        ([(2, [15]), (0, long[6:])], [1], [1]),
        ([(1, short)], [0], [0]),
        ([(3, long)], [0], [0]),
    ):
        request = batch.request(chunks, silent=[0] if chunks[0][1] == long[:6] else [])
        request.pooling.CopyFrom(pooling(rows, sums, {}))
        previous = step = decode_step(request, batch.limits, previous)
        result = runner.launch(step).wait()
        found.append(result.hidden_states)
        assert (result.token_ids >= 0).tolist() == step.samples.tolist()
    states = expected(oracle, long)
    for actual, right in zip(
        found,
        (states[:6].sum(0), states[6:].sum(0), expected(oracle, short)[-1], states[-1]),
        strict=True,
    ):
        np.testing.assert_allclose(actual, right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("platform", [CpuPlatform, InterpretedPlatform])
def test_scores_beside_hidden_states(model: tuple[Path, Any], platform: type[CpuPlatform]) -> None:
    """Scores come last, whichever rows have them. One has a single token."""
    path, oracle = model
    settings = worker_settings(path, block_size=16, max_num_seqs=4, attention="auto")
    runner = ModelRunner(settings, platform(settings))
    runner.configure(1, NUM_BLOCKS)
    batch = batch_for(runner, NUM_BLOCKS)
    request = batch.request([*enumerate(PROMPTS), (3, [9, 9])])
    request.pooling.CopyFrom(pooling([0, 1, 2, 3], [0, 0, 0, 1], {0: (YES, NO), 2: (NO, 3)}))
    step = decode_step(request, batch.limits, None)
    found = runner.launch(step).wait().hidden_states
    with torch.inference_mode():
        logits = [oracle(torch.tensor([each])).logits[0, -1].numpy() for each in PROMPTS]
    states = [expected(oracle, PROMPTS[1])[-1], expected(oracle, [9, 9]).sum(0)]
    scores = [logits[0][YES] - logits[0][NO], logits[2][NO] - logits[2][3]]
    np.testing.assert_allclose(found, np.concatenate([*states, scores]), rtol=1e-5, atol=1e-5)
    request = batch.request([(0, [5])])
    request.pooling.CopyFrom(pooling([0], [0], {0: (YES, NO)}))
    (one,) = runner.launch(decode_step(request, batch.limits, step)).wait().hidden_states
    with torch.inference_mode():
        logits = oracle(torch.tensor([[*PROMPTS[0], 5]])).logits[0, -1]
    assert one == pytest.approx(float(logits[YES] - logits[NO]), abs=1e-5)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("platform", [CpuPlatform, InterpretedPlatform])
def test_scores_in_bfloat16_are_not_rounded(
    tmp_path: Path, platform: type[CpuPlatform], tied: bool
) -> None:
    oracle = save_model(tmp_path, dtype=torch.bfloat16, std=0.5, tie_word_embeddings=tied)
    settings = worker_settings(tmp_path, block_size=16, max_num_seqs=8, dtype="bfloat16")
    runner = ModelRunner(settings, platform(settings))
    runner.configure(1, NUM_BLOCKS)
    batch = batch_for(runner, NUM_BLOCKS)
    prompts = [[first, 5, 9] for first in range(8)]
    request = batch.request([*enumerate(prompts)])
    rows = [*range(8)]
    request.pooling.CopyFrom(pooling(rows, [0] * 8, dict.fromkeys(rows, (YES, NO))))
    found = runner.launch(decode_step(request, batch.limits, None)).wait().hidden_states
    request = Batch(batch.limits).request([*enumerate(prompts)])
    request.pooling.CopyFrom(pooling(rows, [0] * 8, {}))
    states = runner.launch(decode_step(request, batch.limits, None)).wait().hidden_states
    head = oracle.lm_head.weight.detach().float().numpy()
    right = states.reshape(8, -1) @ (head[YES] - head[NO])
    tolerance = {"rtol": 1e-2, "atol": 0.03} if ROUNDS else {"rtol": 1e-4}
    np.testing.assert_allclose(found, right, **tolerance)


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_saved_without_a_head(tmp_path: Path, tied: bool) -> None:
    """Models for embeddings are saved so, and their tensors have no prefix."""
    whole = save_model(tmp_path / "whole", tie_word_embeddings=tied)
    whole.model.save_pretrained(tmp_path / "base")
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3Model"]
    for architecture in ("Qwen3Model", "Qwen3ForCausalLM"):
        config["architectures"] = [architecture]
        (tmp_path / "base" / "config.json").write_text(json.dumps(config))
        runner = ModelRunner(worker_settings(tmp_path / "base", block_size=16))
        runner.configure(1, NUM_BLOCKS)
        batch = batch_for(runner, NUM_BLOCKS)
        request = batch.request([(0, PROMPTS[0])])
        request.pooling.CopyFrom(pooling([0], [0], {}))
        found = runner.launch(decode_step(request, batch.limits, None)).wait().hidden_states
        right = expected(whole, PROMPTS[0])[-1]
        np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-5)
