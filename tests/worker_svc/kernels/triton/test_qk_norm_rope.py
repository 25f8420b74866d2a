from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    apply_rotary_pos_emb,
)

from bench.gpu.heads import QWEN_0_6B, QWEN_8B
from tests.worker_svc.device import DEVICE, ODD, TOKENS, by_device, cpu_only
from tests.worker_svc.kernels.triton.precision import DTYPES, assert_rounded_once, poisoned_memory
from worker_svc.kernels.triton import qk_norm_rope as module
from worker_svc.kernels.triton.qk_norm_rope import norm_rope_store, norm_rope_store_reference

EPS = 1e-3  # large enough to show
BLOCK_SIZE = by_device(cpu=3, gpu=16)
MAX_POSITION = by_device(cpu=50, gpu=5000)


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
        """Calls the reference with copies in float32."""
        parts = (self.qkv, self.q_weight, self.k_weight, self.cache)
        qkv, q_weight, k_weight, cache = (x.to(torch.float32, copy=True) for x in parts)
        return replace(self, qkv=qkv, q_weight=q_weight, k_weight=k_weight, cache=cache)


def random(num_heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, tokens: int) -> Inputs:
    """Strided rows with NaN between them; the first and the last position; a third of the rows are
    padding; a cache of NaN."""
    generator = torch.Generator().manual_seed(head_dim)
    size = (num_heads + 2 * kv_heads) * head_dim
    qkv = torch.full((tokens, size + 16), torch.nan, dtype=dtype)
    qkv[:, :size] = 3 * torch.randn(tokens, size, generator=generator)
    angles = 7 * torch.rand(MAX_POSITION, head_dim // 2, generator=generator)
    positions = torch.randint(MAX_POSITION, (tokens,), generator=generator, dtype=torch.int32)
    positions[:2] = torch.tensor([MAX_POSITION - 1, 0])[:tokens]
    blocks = -(-tokens // BLOCK_SIZE) + 1
    slots = torch.randperm(blocks * BLOCK_SIZE, generator=generator)[:tokens].int()
    slots[2::3] = -1
    return Inputs(
        qkv.to(DEVICE)[:, :size],
        num_heads,
        torch.randn(head_dim, generator=generator).to(DEVICE, dtype),
        torch.randn(head_dim, generator=generator).to(DEVICE, dtype),
        EPS,
        torch.stack((angles.cos(), angles.sin()), dim=1).to(DEVICE),
        positions.to(DEVICE),
        slots.to(DEVICE),
        torch.full((2, blocks, BLOCK_SIZE, kv_heads, head_dim), torch.nan).to(DEVICE, dtype),
    )


@pytest.mark.parametrize("tokens", by_device(cpu=[7], gpu=TOKENS))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_heads", "kv_heads", "head_dim"),
    by_device(
        cpu=[(1, 1, 16), (4, 4, 24), (5, 1, 80), (16, 8, 128), (12, 3, 64), (2, 1, 256)],
        gpu=[QWEN_0_6B, QWEN_8B, ODD],
    ),
)
def test_equals_the_reference(
    num_heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, tokens: int
) -> None:
    """More and fewer heads than a program takes; slots that no token has, and memory around the
    cache, stay NaN."""
    inputs = random(num_heads, kv_heads, head_dim, dtype, tokens)
    around = torch.cat((inputs.cache, inputs.cache))
    inputs.cache = around[1:3]
    exact = inputs.exact()
    expected = norm_rope_store_reference(**vars(exact))
    with poisoned_memory():
        q = norm_rope_store(**vars(inputs))
    assert q.dtype == dtype
    assert_rounded_once(q, expected)
    slots = inputs.slot_mapping[inputs.slot_mapping >= 0].long()
    actual, expected = (cache.flatten(1, 2) for cache in (inputs.cache, exact.cache))
    assert_rounded_once(actual[0, slots], expected[0, slots])
    assert torch.equal(actual[1, slots].float(), expected[1, slots])  # values are only moved
    actual[:, slots] = torch.nan
    assert around.isnan().all()


@cpu_only
@pytest.mark.launches_nothing
def test_reference_is_what_transformers_computes() -> None:
    config = Qwen3Config(head_dim=24)
    inputs = random(4, 2, 24, torch.float32, tokens=7)
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


@pytest.mark.launches_nothing
def test_no_tokens_launch_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_norm_rope_store_kernel", None)
    inputs = random(4, 2, 16, torch.float32, tokens=1)
    inputs.qkv = inputs.qkv[:0]
    assert norm_rope_store(**vars(inputs)).shape == (0, 4, 16)
