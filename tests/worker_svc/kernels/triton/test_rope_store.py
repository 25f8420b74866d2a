from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from bench.gpu.steps import QWEN_0_6B, QWEN_8B
from tests.worker_svc.device import DEVICE, ODD, TOKENS, by_device
from tests.worker_svc.kernels.triton.caches import large_cache, rope_store_reference
from tests.worker_svc.kernels.triton.precision import DTYPES, assert_rounded_once, poisoned_memory
from worker_svc.attention.base import QKNorm
from worker_svc.kernels.triton.rope_store import rope_store

EPS = 1e-3  # large enough to show
BLOCK_SIZE = by_device(cpu=3, gpu=16)
MAX_POSITION = by_device(cpu=50, gpu=5000)


@dataclass
class Inputs:
    qkv: torch.Tensor
    num_heads: int
    norm: QKNorm | None
    cos_sin: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    cache: torch.Tensor

    def exact(self) -> Inputs:
        """The inputs in float32, with a copy of the cache."""
        return replace(self, qkv=self.qkv.float(), cache=self.cache.to(torch.float32, copy=True))


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
        QKNorm(*torch.randn(2, head_dim, generator=generator).to(DEVICE, dtype), EPS),
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
        inputs.norm = None
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
