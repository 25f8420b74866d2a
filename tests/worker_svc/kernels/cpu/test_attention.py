from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from worker_svc.kernels.cpu.attention import TILE_ROWS, attend
from worker_svc.kernels.cpu.kv_store import cache_row, rope_store

from tests.worker_svc.kernels.cpu.test_weights import CPUS, run_as
from worker_svc.kernels.cpu_features import has

EPS = 1e-6
# Tokens of the step and of the context: decodes, prompts, parts of prompts, several chunks of keys.
SEQUENCES = [(1, 1), (1, 3), (1, 17), (5, 5), (7, 40), (33, 300), (1, 600), (64, 64)]

BOUND = 1e-5


@dataclass
class Layer:
    """Projections of whole sequences, and a cache whose unused slots hold NaN."""

    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: type[np.generic]

    def __post_init__(self) -> None:
        random = torch.Generator().manual_seed(self.head_dim)
        columns = self.heads + 2 * self.kv_heads
        self.qkv = [
            torch.randn(context, columns, self.head_dim, generator=random)
            for _, context in SEQUENCES
        ]
        self.q_weight, self.k_weight = torch.rand(2, self.head_dim, generator=random) + 0.5
        self.cos_sin = torch.randn(600, 2, self.head_dim // 2, generator=random)
        blocks = [-(-context // self.block_size) for _, context in SEQUENCES]
        self.first_blocks = np.cumsum([0, *blocks])[:-1]
        self.table = torch.randperm(sum(blocks), generator=random).numpy()
        size = cache_row(self.block_size, self.head_dim, scaled=self.dtype is np.int8)
        self.cache = np.empty((2, sum(blocks), self.kv_heads, size), self.dtype)
        self.cache.view(np.uint8)[...] = 0xFF

    def store(self, parts: list[range]) -> np.ndarray:
        """Stores these positions of each sequence -> their queries."""
        qkv = torch.cat([whole[list(part)] for whole, part in zip(self.qkv, parts, strict=True)])
        slots = []
        for first, part in zip(self.first_blocks, parts, strict=True):
            positions = np.array(part, np.int64)
            blocks = self.table[first + positions // self.block_size]
            slots.append(blocks * self.block_size + positions % self.block_size)
        q = np.empty((len(qkv), self.heads, self.head_dim), np.float32)
        rope_store(
            qkv.numpy(),
            self.q_weight.numpy(),
            self.k_weight.numpy(),
            EPS,
            self.cos_sin.numpy(),
            np.concatenate(parts).astype(np.int64),
            np.concatenate(slots),
            self.block_size,
            self.cache,
            q,
        )
        return q

    def attend(self, q: np.ndarray, sequences: list[int], query_lens: list[int]) -> torch.Tensor:
        group = self.heads // self.kv_heads
        tiles = [
            (n, row)
            for n, tokens in enumerate(query_lens)
            for row in range(0, tokens * group, TILE_ROWS)
        ]
        out = np.full(q.shape, np.nan, np.float32)
        attend(
            q,
            self.cache,
            self.block_size,
            np.array(tiles),
            np.cumsum([0, *query_lens]),
            np.array([SEQUENCES[n][1] for n in sequences]),
            self.table,
            self.first_blocks[sequences],
            self.head_dim**-0.5,
            out,
        )
        return torch.from_numpy(out)

    def expected(self, n: int) -> torch.Tensor:
        """By torch, from keys and values rounded as the cache rounds them, and queries as products
        of bfloat16 do."""
        tokens, context = SEQUENCES[n]
        q, k, v = self.qkv[n].split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        q, k = self._rotated(q, self.q_weight), self._rotated(k, self.k_weight)
        k, v = self._rounded(k), self._rounded(v)
        scale = self.head_dim**-0.5
        if self.dtype is np.uint16 and has("avx512bf16"):
            q = (q * scale).bfloat16().float() / scale
        mask = torch.ones(tokens, context, dtype=torch.bool).tril(context - tokens)
        q, k, v = (x.transpose(0, 1)[None] for x in (q[context - tokens :], k, v))
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return seen[0].transpose(0, 1)

    def _rotated(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        x = F.rms_norm(x, x.shape[-1:], weight, EPS)
        cos, sin = self.cos_sin[: len(x)].transpose(0, 1)[:, :, None]
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    def _rounded(self, x: torch.Tensor) -> torch.Tensor:
        if self.dtype is np.uint16:
            return x.bfloat16().float()
        if self.dtype is np.int8:
            largest = x.abs().amax(dim=-1, keepdim=True)
            return (x * (127 / largest)).round() * (largest / 127)
        return x


def check(
    dtype: type[np.generic], heads: int, kv_heads: int, head_dim: int, block_size: int
) -> None:
    """Attention equals torch's, and to the bit what it is for a sequence alone."""
    layer = Layer(heads, kv_heads, head_dim, block_size, dtype)
    layer.store([range(context - tokens) for tokens, context in SEQUENCES])
    q = layer.store([range(context - tokens, context) for tokens, context in SEQUENCES])
    query_lens = [tokens for tokens, _ in SEQUENCES]
    out = layer.attend(q, list(range(len(SEQUENCES))), query_lens)
    ends = np.cumsum(query_lens)
    for n, (end, tokens) in enumerate(zip(ends, query_lens, strict=True)):
        seen = out[end - tokens : end]
        # The cache's rounding differs where the order of a norm's sum moves a number across the
        # middle of two codes.
        rounding = {np.float32: 0.0, np.uint16: 1.5e-2, np.int8: 2e-2}[dtype]
        torch.testing.assert_close(seen, layer.expected(n), rtol=BOUND, atol=BOUND + rounding)
        alone = layer.attend(q[end - 1 : end].copy(), [n], [1])
        assert torch.equal(alone[0], seen[-1])


@pytest.mark.parametrize("dtype", [np.float32, np.uint16, np.int8])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size"),
    [(4, 4, 24, 16), (8, 1, 40, 4), (16, 8, 128, 16), (6, 2, 32, 64), (2, 1, 16, 512)],
)
def test_equals_torch_alone_and_in_a_crowd(
    dtype: type[np.generic], heads: int, kv_heads: int, head_dim: int, block_size: int
) -> None:
    check(dtype, heads, kv_heads, head_dim, block_size)


@pytest.mark.soak
@pytest.mark.parametrize("cpu", CPUS)
def test_older_cpus(cpu: str) -> None:
    run_as(
        cpu,
        "import numpy as np; from tests.worker_svc.kernels.cpu.test_attention import check; "
        "[check(dtype, 6, 2, 24, 16) for dtype in (np.uint16, np.int8)]",
    )
