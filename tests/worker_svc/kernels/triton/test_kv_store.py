from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.gpu.heads import QWEN_0_6B
from tests.worker_svc.device import DEVICE, ODD, TOKENS, by_device
from tests.worker_svc.kernels.triton.large_cache import large_cache
from tests.worker_svc.kernels.triton.precision import DTYPES, assert_identical
from worker_svc.kernels.triton import kv_store as module
from worker_svc.kernels.triton.kv_store import store_kv, store_kv_reference


def some_slots(num_slots: int, tokens: int, generator: torch.Generator) -> torch.Tensor:
    """Slots in random order, the last and the first among them; a third is padding, -1."""
    others = torch.randperm(num_slots - 2, generator=generator) + 1
    slots = torch.cat((torch.tensor([num_slots - 1, 0]), others))[:tokens]
    slots[2::3] = -1
    return slots.int()


@pytest.mark.parametrize("tokens", by_device(cpu=[9], gpu=TOKENS))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("kv_heads", "head_dim"),
    by_device(cpu=[(1, 16), (2, 40), (3, 24), (8, 128)], gpu=[QWEN_0_6B[1:], ODD[1:]]),
)
@pytest.mark.parametrize("block_size", by_device(cpu=[3, 16], gpu=[16]))
def test_store(
    block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype, tokens: int
) -> None:
    """Keys and values as parts of one projection; padding rows; all other slots, and memory around
    the cache, stay as they are."""
    blocks, size = -(-tokens // block_size) + 1, kv_heads * head_dim
    generator = torch.Generator().manual_seed(block_size)
    projection = torch.randn(tokens, 3 * size, generator=generator).to(dtype)
    k, v = (x.unflatten(1, (kv_heads, head_dim)) for x in projection.split(size, dim=1)[1:])
    slots = some_slots(blocks * block_size, tokens, generator)
    around = torch.full((4, blocks, block_size, kv_heads, head_dim), torch.nan, dtype=dtype)
    expected = around.clone()
    for slot, key, value in zip(slots.tolist(), k, v, strict=True):
        if slot >= 0:
            expected[1, slot // block_size, slot % block_size] = key
            expected[2, slot // block_size, slot % block_size] = value

    k, v = (x.unflatten(1, (kv_heads, head_dim)) for x in projection.to(DEVICE).chunk(3, 1)[1:])
    for store in (store_kv, store_kv_reference):
        actual = around.to(DEVICE, copy=True)
        store(k, v, slots.to(DEVICE), actual[1:3])
        assert_identical(actual.cpu(), expected)


def test_slots_beyond_32_bit_offsets(tmp_path: Path) -> None:
    small = torch.zeros(2, 3, 16, 2, 256, dtype=torch.float16, device=DEVICE)
    k, v = torch.randn(2, 40, 2, 256, generator=torch.Generator().manual_seed(0)).half().to(DEVICE)
    slots = some_slots(48, 40, torch.Generator().manual_seed(1)).to(DEVICE)
    store_kv_reference(k, v, slots, small)
    large = large_cache((3, *small.shape[2:]), small.dtype, tmp_path / "cache")
    large[:, -3:] = 0
    first = (large.shape[1] - 3) * 16
    store_kv(k, v, torch.where(slots < 0, -1, slots + first), large)
    assert torch.equal(large[:, -3:], small)


@pytest.mark.launches_nothing
def test_no_tokens_launch_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_store_kv_kernel", None)
    none = torch.empty(0, 2, 16)
    store_kv(none, none, torch.empty(0, dtype=torch.int32), torch.empty(2, 1, 4, 2, 16))
