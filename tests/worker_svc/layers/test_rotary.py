from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from worker_svc.layers.rotary import rotary_table
from worker_svc.models.config import _rope

YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 4.0,
    "original_max_position_embeddings": 256,
}


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
def test_angles_are_those_of_transformers(parameters: dict[str, Any], head_dim: int) -> None:
    config = Qwen3Config(
        head_dim=head_dim, rope_parameters=dict(parameters), max_position_embeddings=1024
    )
    table = rotary_table(head_dim, 1024, _rope(config.rope_parameters), torch.device("cpu"))
    positions = torch.tensor([0, 1, 7, 255, 256, 1023])
    for ours, theirs in zip(
        table[positions].unbind(1),
        Qwen3RotaryEmbedding(config)(torch.empty(0), positions[None]),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs[0, :, : head_dim // 2])
