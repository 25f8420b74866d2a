from __future__ import annotations

import pytest
import torch

from tests.worker_svc.kernels.precision import DTYPES
from worker_svc.kernels import kv_store as module
from worker_svc.kernels.kv_store import store_kv, store_kv_reference


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kv_heads", "head_dim"), [(1, 16), (2, 40), (3, 24), (8, 128)])
@pytest.mark.parametrize("block_size", [3, 16])
def test_store(block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    """Keys and values as parts of one projection; shuffled slots, the first and the last among
    them; padding rows; all other slots, and memory around the cache, stay as they are."""
    blocks, size = 4, kv_heads * head_dim
    generator = torch.Generator().manual_seed(block_size)
    projection = torch.randn(9, 3 * size, generator=generator).to(dtype)
    k, v = (x.unflatten(1, (kv_heads, head_dim)) for x in projection.split(size, dim=1)[1:])
    last = blocks * block_size - 1
    slots = [last, -1, 5, 0, block_size, -1, 7, 1, block_size - 1]
    around = torch.full((4, blocks, block_size, kv_heads, head_dim), torch.nan, dtype=dtype)
    expected = around.clone()
    for slot, key, value in zip(slots, k, v, strict=True):
        if slot >= 0:
            expected[1, slot // block_size, slot % block_size] = key
            expected[2, slot // block_size, slot % block_size] = value

    for store in (store_kv, store_kv_reference):
        actual = around.clone()
        store(k, v, torch.tensor(slots, dtype=torch.int32), actual[1:3])
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def test_no_tokens_launch_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_store_kv_kernel", None)
    none = torch.empty(0, 2, 16)
    store_kv(none, none, torch.empty(0, dtype=torch.int32), torch.empty(2, 1, 4, 2, 16))
