"""Checkpoints whose q, k and v are one matrix, and whose heads are rotated in part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Phi3ForCausalLM

from tests.worker_svc.harness import save_model
from tests.worker_svc.quantization.writers import FORMATS, Format, save_quantized
from tests.worker_svc.test_model_runner import last_logits, make_runner, prompts

FUSED = "qkv_proj", "o_proj", "gate_up_proj", "down_proj"
PARTIAL: dict[str, Any] = {"rope_theta": 1e4, "partial_rotary_factor": 0.75}


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_logits_of_quantized_checkpoints(tmp_path: Path, format: Format) -> None:
    oracle = save_quantized(
        tmp_path, format, FUSED, family=Phi3ForCausalLM, rope_parameters=PARTIAL
    )
    logits, expected = last_logits(tmp_path, oracle)
    assert (logits - expected).abs().max() < 0.05 * expected.abs().max()


@pytest.mark.parametrize("quantization", ["none", "int8", "int4", "fp8"])
def test_fused_matrices_become_what_separate_ones_do(tmp_path: Path, quantization: str) -> None:
    """Bit by bit: Phi-3 whose heads are rotated whole is a Llama."""
    fused, separate = tmp_path / "fused", tmp_path / "separate"
    save_model(fused, family=Phi3ForCausalLM, intermediate_size=128)
    tensors = load_file(fused / "model.safetensors")
    for name in [*tensors]:
        if "qkv_proj" in name:
            for part, piece in zip("qkv", tensors.pop(name).split([64, 32, 32]), strict=True):
                tensors[name.replace("qkv_proj", f"{part}_proj")] = piece.clone()
        elif "gate_up_proj" in name:
            for part, piece in zip(("gate", "up"), tensors.pop(name).split(128), strict=True):
                tensors[name.replace("gate_up_proj", f"{part}_proj")] = piece.clone()
    separate.mkdir()
    save_file(tensors, separate / "model.safetensors")
    config = json.loads((fused / "config.json").read_text())
    config["architectures"] = ["LlamaForCausalLM"]
    (separate / "config.json").write_text(json.dumps(config))
    (tokens,) = prompts(301, [40])
    found = []
    for path in (fused, separate):
        for _ in range(2):  # the second one reads packed weights
            runner, batch = make_runner(path, quantization=quantization)
            found.append(runner.logits(batch.step([(0, tokens)])))
    assert all(torch.equal(each, found[0]) for each in found)
