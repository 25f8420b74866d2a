from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from worker_svc.kernels.cpu.attention import decode_attention, write_cache
from worker_svc.kernels.cpu.simd import bits

pytestmark = pytest.mark.launches_nothing


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 4, 24), (8, 1, 40), (16, 8, 128)])
@pytest.mark.parametrize("block_size", [16, 3])
def test_equals_sdpa(
    dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, block_size: int
) -> None:
    """Sequences of many lengths, their blocks scattered, unused slots NaN."""
    lengths = [1, 3, 16, 17, 100]
    generator = torch.Generator().manual_seed(0)
    blocks_of = [-(-n // block_size) for n in lengths]
    order = torch.randperm(sum(blocks_of), generator=generator)
    size = (sum(blocks_of), kv_heads, block_size, head_dim)
    keys, values = (torch.full(size, torch.nan, dtype=dtype) for _ in range(2))
    q = torch.randn(len(lengths), heads, head_dim, generator=generator).to(dtype)
    first = np.cumsum([0, *blocks_of])[:-1]
    expected = []
    for n, (length, query) in enumerate(zip(lengths, q, strict=True)):
        k, v = torch.randn(2, length, kv_heads, head_dim, generator=generator).to(dtype)
        positions = np.arange(length)
        table = order[first[n] : first[n] + blocks_of[n]].numpy()
        slots = table[positions // block_size] * block_size + positions % block_size
        write_cache(bits(k), bits(v), slots, bits(keys), bits(values))
        k, v = (x.float().transpose(0, 1)[None] for x in (k, v))
        seen = F.scaled_dot_product_attention(query.float()[None, :, None], k, v, enable_gqa=True)
        expected.append(seen[0, :, 0])

    out = torch.empty(q.shape)
    decode_attention(
        bits(q),
        bits(keys),
        bits(values),
        np.arange(len(lengths)),
        np.array(lengths),
        order.numpy(),
        first,
        head_dim**-0.5,
        out.numpy(),
    )
    torch.testing.assert_close(out, torch.stack(expected), atol=2e-6, rtol=2e-5)
