from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

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
from tests.worker_svc.kernels.triton.large_cache import large_cache
from tests.worker_svc.kernels.triton.precision import DTYPES, assert_rounded_once, poisoned_memory
from worker_svc.kernels.triton import rope_store as module
from worker_svc.kernels.triton.rope_store import rope_store, rope_store_reference

EPS = 1e-3  # large enough to show
BLOCK_SIZE = by_device(cpu=3, gpu=16)
MAX_POSITION = by_device(cpu=50, gpu=5000)


@dataclass
class Inputs:
    qkv: torch.Tensor
    num_heads: int
    q_weight: torch.Tensor | None
    k_weight: torch.Tensor | None
    eps: float
    cos_sin: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    cache: torch.Tensor

    def exact(self) -> Inputs:
        """Calls the reference with copies in float32."""

        def copy(x: torch.Tensor | None) -> Any:
            return None if x is None else x.to(torch.float32, copy=True)

        return replace(
            self,
            qkv=copy(self.qkv),
            q_weight=copy(self.q_weight),
            k_weight=copy(self.k_weight),
            cache=copy(self.cache),
        )

    def without_norm(self) -> Inputs:
        return replace(self, q_weight=None, k_weight=None)


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


@pytest.mark.parametrize("norm", [True, False], ids=["norm", "no norm"])
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
    num_heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, tokens: int, norm: bool
) -> None:
    """More and fewer heads than a program takes; slots that no token has, and memory around the
    cache, stay NaN."""
    inputs = random(num_heads, kv_heads, head_dim, dtype, tokens)
    if not norm:
        inputs = inputs.without_norm()
    around = torch.cat((inputs.cache, inputs.cache))
    inputs.cache = around[1:3]
    exact = inputs.exact()
    expected = rope_store_reference(**vars(exact))
    with poisoned_memory():
        q = rope_store(**vars(inputs))
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
@pytest.mark.parametrize("norm", [True, False], ids=["norm", "no norm"])
def test_reference_is_what_transformers_computes(norm: bool) -> None:
    config = Qwen3Config(head_dim=24)
    inputs = random(4, 2, 24, torch.float32, tokens=7)
    q, k, v = inputs.qkv.unflatten(1, (-1, 24)).split((4, 2, 2), dim=1)
    normed = []
    for x, weight in ((q, inputs.q_weight), (k, inputs.k_weight)):
        layer = Qwen3RMSNorm(24, EPS)
        layer.weight.data = weight
        normed.append(layer(x).detach() if norm else x)
    if not norm:
        inputs = inputs.without_norm()
    rotary = Qwen3RotaryEmbedding(config)
    expected_q, expected_k = apply_rotary_pos_emb(
        *(x.transpose(0, 1)[None] for x in normed),
        *rotary(inputs.qkv, inputs.positions[None].long()),
    )
    cos, sin = rotary(inputs.qkv, torch.arange(50)[None])
    inputs.cos_sin = torch.stack((cos[0, :, :12], sin[0, :, :12]), dim=1)

    actual = rope_store_reference(**vars(inputs))
    torch.testing.assert_close(actual, expected_q[0].transpose(0, 1))
    kept = inputs.slot_mapping >= 0
    cached = inputs.cache.flatten(1, 2)[:, inputs.slot_mapping[kept].long()]
    torch.testing.assert_close(cached[0], expected_k[0].transpose(0, 1)[kept])
    assert torch.equal(cached[1], v[kept])


def test_slots_beyond_32_bit_offsets(tmp_path: Path) -> None:
    inputs = random(4, 2, 256, torch.float16, tokens=9)
    small = torch.zeros_like(inputs.cache)
    q = rope_store(**vars(replace(inputs, cache=small)))
    large = large_cache((len(small[0]), *small.shape[2:]), small.dtype, tmp_path / "cache")
    last = large[:, -len(small[0]) :]
    last.zero_()
    slots, first = inputs.slot_mapping, (large.shape[1] - len(small[0])) * BLOCK_SIZE
    moved = replace(inputs, cache=large, slot_mapping=torch.where(slots < 0, -1, slots + first))
    assert torch.equal(rope_store(**vars(moved)), q)
    assert torch.equal(last, small)


@pytest.mark.launches_nothing
def test_no_tokens_launch_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_rope_store_kernel", None)
    inputs = random(4, 2, 16, torch.float32, tokens=1)
    inputs.qkv = inputs.qkv[:0]
    assert rope_store(**vars(inputs)).shape == (0, 4, 16)
