from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    apply_rotary_pos_emb,
)

from tests.worker_svc.steps import step_tensors
from worker_svc.attention.base import AttentionShape, QKNorm
from worker_svc.attention.cpu_backend import CpuBackend
from worker_svc.layers.rotary import rotary_table
from worker_svc.models.config import _rope

YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 4.0,
    "original_max_position_embeddings": 256,
}


@pytest.mark.parametrize("norm", [True, False], ids=["norm", "no norm"])
@pytest.mark.parametrize("head_dim", [24, 40, 128])
@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "default", "rope_theta": 1e4},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0},
        YARN,
        {**YARN, "beta_fast": 8.0, "beta_slow": 2.0, "truncate": False},
        {**YARN, "attention_factor": 0.7},
        {**YARN, "mscale": 0.9, "mscale_all_dim": 1.4},
        {**YARN, "factor": 1.0, "original_max_position_embeddings": 1024},
    ],
    ids=lambda p: "-".join(f"{v}" for v in p.values()),
)
def test_normalizes_and_rotates_as_transformers_does(
    parameters: dict[str, Any], head_dim: int, norm: bool
) -> None:
    config = Qwen3Config(
        head_dim=head_dim, rope_parameters=dict(parameters), max_position_embeddings=1024
    )
    oracle = Qwen3RotaryEmbedding(config)
    table = rotary_table(head_dim, 1024, _rope(config.rope_parameters), torch.device("cpu"))
    positions = torch.tensor([0, 1, 7, 255, 256, 1023])
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(len(positions), 4, head_dim, generator=generator)  # two queries, k, v

    layer = Qwen3RMSNorm(head_dim, eps=1e-5)
    layer.weight.data.uniform_(0.5, 1.5, generator=generator)

    cos, sin = oracle(qkv, positions[None])
    normed = (layer(qkv).detach() if norm else qkv)[None]
    expected, _ = apply_rotary_pos_emb(normed, normed, cos, sin, unsqueeze_dim=2)
    weight = layer.weight.detach()
    shape = AttentionShape(1, 2, 1, head_dim, torch.float32, torch.device("cpu"))
    backend = CpuBackend(shape, block_size=16)
    (cache,) = backend.allocate(1)
    numbers = range(len(positions))
    tensors = step_tensors(input_ids=numbers, positions=positions, slot_mapping=numbers)
    q = backend.rope_store(
        qkv.flatten(1), QKNorm(weight, weight, 1e-5) if norm else None, table, cache, tensors
    )

    torch.testing.assert_close(q.view(-1, 2, head_dim), expected[0, :, :2])
    k = cache[0, 0, 0, : 16 * head_dim].view(head_dim, 16)[:, : len(positions)].T
    torch.testing.assert_close(k, expected[0, :, 2])
