"""Quantized mixtures of experts: of equal experts, they are the model with one MLP."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3MoeForCausalLM

from tests.worker_svc.harness import load_rank, save_model
from tests.worker_svc.quantization.writers import FORMATS, SHAPE, Format, save_quantized
from tests.worker_svc.test_model_runner import make_runner, prompts
from worker_svc.errors import ModelError
from worker_svc.ranks.distributed import TensorParallel

COUNT = 5


def with_experts(dense: Path, path: Path) -> None:
    """Writes the checkpoint `dense` with `COUNT` copies of each MLP."""
    config = json.loads((dense / "config.json").read_text())
    config |= {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": COUNT,
        "num_experts_per_tok": 2,
    }
    config |= {"moe_intermediate_size": config["intermediate_size"], "norm_topk_prob": True}
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(dense / "model.safetensors").items():
        layer, is_mlp, rest = name.partition(".mlp.")
        if not is_mlp:
            tensors[name] = tensor
            continue
        router = torch.Generator().manual_seed(len(layer))
        tensors[f"{layer}.mlp.gate.weight"] = torch.randn(
            COUNT, config["hidden_size"], generator=router
        )
        for expert in range(COUNT):
            tensors[f"{layer}.mlp.experts.{expert}.{rest}"] = tensor.clone()
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))


def logits(path: Path, **settings: Any) -> torch.Tensor:
    runner, batch = make_runner(path, **settings)
    long, short = prompts(301, [40, 3])
    return runner.logits(batch.step([(0, long), (1, short)]))


def check(dense: Path, path: Path, **settings: Any) -> None:
    expected, found = logits(dense, **settings), logits(path, **settings)
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_of_quantized_checkpoints(tmp_path: Path, format: Format) -> None:
    save_quantized(tmp_path / "dense", format)
    with_experts(tmp_path / "dense", tmp_path / "experts")
    check(tmp_path / "dense", tmp_path / "experts")


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
def test_that_are_quantized_now_and_then_read(tmp_path: Path, quantization: str) -> None:
    save_model(tmp_path / "dense", **SHAPE)
    with_experts(tmp_path / "dense", tmp_path / "experts")
    for _ in range(2):
        check(tmp_path / "dense", tmp_path / "experts", quantization=quantization)


def test_a_rank_without_experts_is_an_error(tmp_path: Path) -> None:
    save_model(tmp_path, family=Qwen3MoeForCausalLM, num_experts=3, num_experts_per_tok=2)
    with pytest.raises(ModelError, match=r"^num_experts: 3 cannot be split over tp = 4 ranks"):
        load_rank(tmp_path, TensorParallel(0, 4))
