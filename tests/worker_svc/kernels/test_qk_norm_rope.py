from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    apply_rotary_pos_emb,
)

from tests.worker_svc.kernels.precision import DTYPES, assert_rounded_once, poisoned_memory
from worker_svc.kernels import qk_norm_rope as module
from worker_svc.kernels.qk_norm_rope import norm_rope_store, norm_rope_store_reference

EPS = 1e-3  # large enough to show
BLOCK_SIZE = 3
TOKENS = 7


@dataclass
class Inputs:
    qkv: torch.Tensor
    num_heads: int
    q_weight: torch.Tensor
    k_weight: torch.Tensor
    eps: float
    cos_sin: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    cache: torch.Tensor

    def exact(self) -> Inputs:
        """With copies in float32."""
        parts = (self.qkv, self.q_weight, self.k_weight, self.cache)
        qkv, q_weight, k_weight, cache = (x.to(torch.float32, copy=True) for x in parts)
        return Inputs(
            qkv,
            self.num_heads,
            q_weight,
            k_weight,
            self.eps,
            self.cos_sin,
            self.positions,
            self.slot_mapping,
            cache,
        )


def random(num_heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> Inputs:
    """Rows that lie apart, NaN between them; two padding rows; a cache of NaN."""
    generator = torch.Generator().manual_seed(head_dim)
    size = (num_heads + 2 * kv_heads) * head_dim
    qkv = torch.full((TOKENS, size + 16), torch.nan, dtype=dtype)[:, :size]
    qkv[:] = 3 * torch.randn(TOKENS, size, generator=generator)
    angles = 7 * torch.rand(50, head_dim // 2, generator=generator)
    return Inputs(
        qkv,
        num_heads,
        torch.randn(head_dim, generator=generator).to(dtype),
        torch.randn(head_dim, generator=generator).to(dtype),
        EPS,
        torch.stack((angles.cos(), angles.sin()), dim=1),
        torch.tensor([49, 0, 1, 0, 48, 7, 0], dtype=torch.int32),
        torch.tensor([11, 0, 4, -1, 9, 2, -1], dtype=torch.int32),
        torch.full((2, 4, BLOCK_SIZE, kv_heads, head_dim), torch.nan, dtype=dtype),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_heads", "kv_heads", "head_dim"),
    [(1, 1, 16), (4, 4, 24), (5, 1, 80), (16, 8, 128), (12, 3, 64), (2, 1, 256)],
)
def test_equals_the_reference(
    num_heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    """More and fewer heads than a program takes; slots that no token has, and memory around the
    cache, stay NaN."""
    inputs = random(num_heads, kv_heads, head_dim, dtype)
    around = torch.full((4, *inputs.cache.shape[1:]), torch.nan, dtype=dtype)
    inputs.cache = around[1:3]
    exact = inputs.exact()
    expected = norm_rope_store_reference(**vars(exact))
    with poisoned_memory():
        q = norm_rope_store(**vars(inputs))
    assert q.dtype == dtype
    assert_rounded_once(q, expected)
    written = torch.zeros(4 * BLOCK_SIZE, dtype=torch.bool)
    written[[11, 0, 4, 9, 2]] = True
    assert around[[0, 3]].isnan().all()
    actual, expected = (cache.flatten(1, 2) for cache in (inputs.cache, exact.cache))
    assert actual[:, ~written].isnan().all()
    assert_rounded_once(actual[0, written], expected[0, written])
    assert torch.equal(actual[1, written].float(), expected[1, written])  # values are only moved


def test_reference_is_what_transformers_computes() -> None:
    config = Qwen3Config(head_dim=24)
    inputs = random(4, 2, 24, torch.float32)
    q, k, v = inputs.qkv.unflatten(1, (-1, 24)).split((4, 2, 2), dim=1)
    norms = []
    for weight in (inputs.q_weight, inputs.k_weight):
        norm = Qwen3RMSNorm(24, EPS)
        norm.weight.data = weight
        norms.append(norm)
    rotary = Qwen3RotaryEmbedding(config)
    expected_q, expected_k = apply_rotary_pos_emb(
        norms[0](q).transpose(0, 1)[None],
        norms[1](k).transpose(0, 1)[None],
        *rotary(inputs.qkv, inputs.positions[None].long()),
    )
    cos, sin = rotary(inputs.qkv, torch.arange(50)[None])
    inputs.cos_sin = torch.stack((cos[0, :, :12], sin[0, :, :12]), dim=1)

    actual = norm_rope_store_reference(**vars(inputs))
    torch.testing.assert_close(actual, expected_q[0].transpose(0, 1).detach())
    kept = inputs.slot_mapping >= 0
    cached = inputs.cache.flatten(1, 2)[:, inputs.slot_mapping[kept].long()]
    torch.testing.assert_close(cached[0], expected_k[0].transpose(0, 1)[kept].detach())
    assert torch.equal(cached[1], v[kept])


def test_no_tokens_launch_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_norm_rope_store_kernel", None)
    inputs = random(4, 2, 16, torch.float32)
    inputs.qkv = inputs.qkv[:0]
    assert norm_rope_store(**vars(inputs)).shape == (0, 4, 16)
