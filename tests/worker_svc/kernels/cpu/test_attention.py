from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.worker_svc.kernels.cpu.eager_ops import eager, step_tensors
from tests.worker_svc.kernels.cpu.test_weights import CPUS, run_as
from worker_svc.attention.base import AttentionShape, QKNorm
from worker_svc.attention.cpu_backend import CpuBackend
from worker_svc.kernels.cpu_features import has

EPS = 1e-6
# Tokens of the step and of the context: decodes, prompts, parts of prompts, several chunks of keys.
SEQUENCES = [(1, 1), (1, 3), (1, 17), (5, 5), (7, 40), (33, 300), (1, 600), (64, 64)]
DTYPES = (torch.float32, torch.bfloat16, torch.int8)  # of the cache
SHAPES = [  # heads, kv_heads, head_dim, block_size
    (4, 4, 24, 16),
    (8, 1, 40, 4),
    (16, 8, 128, 16),
    (6, 2, 32, 64),
    (2, 1, 16, 512),
    (7, 1, 80, 16),
    (3, 1, 18, 12),
    (5, 1, 8, 272),
]
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.int8: 3e-2}  # of weights, to 8 bits


class Layout:
    """Views an array of a cache's shape as keys and values [blocks, kv_heads, slots, head_dim]."""

    def __init__(self, cache: np.ndarray, block_size: int, head_dim: int) -> None:
        lead, depth = cache.shape[1:3], 4 // cache.itemsize
        slots, row_size = padded(block_size, 16), padded(head_dim, 16)
        steps = padded(head_dim, depth) // depth
        keys = cache[0, ..., : slots * steps * depth].reshape(*lead, -1, steps, 16, depth)
        values = cache[1, ..., : slots * row_size].reshape(*lead, -1, row_size, depth)
        # [..., slots / 16, 16, steps, depth] and [..., slots / depth, depth, row_size]
        self.keys, self.values = keys.swapaxes(3, 4), values.swapaxes(3, 4)
        self.scales = cache[..., slots * row_size :]
        self.depth, self.head_dim = depth, head_dim

    def key(self, block: int, slot: int) -> np.ndarray:
        return self.keys[:, :, slot // 16, slot % 16][block]  # [kv_heads, steps, depth]

    def value(self, block: int, slot: int) -> np.ndarray:
        return self.values[:, :, slot // self.depth, slot % self.depth][block]

    def scale(self, side: int, block: int, slot: int) -> np.ndarray:
        return self.scales[side, block, :, 4 * slot : 4 * slot + 4]

    def stored(self, block: int, slot: int) -> tuple[np.ndarray, np.ndarray]:
        """-> the key and value [kv_heads, head_dim] float64"""
        codes = self.key(block, slot), self.value(block, slot)
        numbers = []
        for side, code in enumerate(codes):
            flat = np.ascontiguousarray(code).reshape(len(code), -1)[:, : self.head_dim]
            if flat.dtype == np.int8:
                scale = self.scale(side, block, slot).copy().view(np.float32).astype(np.float64)
                flat = (flat.astype(np.float64) if side else flat.view(np.uint8) - 128.0) * scale
            elif flat.dtype == np.uint16:
                flat = (flat.astype(np.uint32) << 16).view(np.float32)
            numbers.append(flat.astype(np.float64))
        return numbers[0], numbers[1]


def padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


@dataclass
class Layer:
    """Projections of whole sequences, and a cache whose unused bytes are 0xFF. As float32 or
    bfloat16, those are NaN."""

    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    norm: torch.dtype | None = torch.float32
    window: int | None = None

    def __post_init__(self) -> None:
        random = torch.Generator().manual_seed(self.head_dim)
        columns = self.heads + 2 * self.kv_heads
        self.qkv = [
            torch.randn(context, columns, self.head_dim, generator=random)
            for _, context in SEQUENCES
        ]
        self.weights = (torch.rand(2, self.head_dim, generator=random) + 0.5).bfloat16()
        self.cos_sin = torch.randn(600, 2, self.head_dim // 2, generator=random)
        blocks = [-(-context // self.block_size) for _, context in SEQUENCES]
        self.offsets = np.cumsum([0, *blocks])
        self.table = torch.randperm(sum(blocks), generator=random).numpy()
        int8 = self.dtype == torch.int8
        shape = AttentionShape(
            (None,),
            self.heads,
            self.kv_heads,
            self.head_dim,
            torch.float32 if int8 else self.dtype,
            torch.device("cpu"),
            "int8" if int8 else "auto",
        )
        self.backend = CpuBackend(shape, self.block_size)
        (self.cache,) = self.backend.allocate(sum(blocks))
        self.cache.view(torch.uint8).fill_(0xFF)

    def layout(self, cache: torch.Tensor | None = None) -> Layout:
        cache = self.cache if cache is None else cache
        bits = cache.view(torch.uint16) if cache.dtype == torch.bfloat16 else cache
        return Layout(bits.numpy(), self.block_size, self.head_dim)

    def inputs(self, parts: list[range]) -> tuple[torch.Tensor, np.ndarray, np.ndarray]:
        """qkv, positions and slots of these positions of each sequence."""
        qkv = torch.cat([whole[list(part)] for whole, part in zip(self.qkv, parts, strict=True)])
        slots = []
        for first, part in zip(self.offsets[:-1], parts, strict=True):
            positions = np.array(part, np.int64)
            blocks = self.table[first + positions // self.block_size]
            slots.append(blocks * self.block_size + positions % self.block_size)
        return qkv, np.concatenate(parts), np.concatenate(slots)

    def store(self, parts: list[range]) -> torch.Tensor:
        """Stores these positions of each sequence -> their queries."""
        return self.store_rows(*self.inputs(parts))

    def store_rows(
        self, qkv: torch.Tensor, positions: np.ndarray, slots: np.ndarray
    ) -> torch.Tensor:
        norm = None if self.norm is None else QKNorm(*self.weights.to(self.norm), EPS)
        tensors = step_tensors(input_ids=positions, positions=positions, slot_mapping=slots)
        with eager(tensors, caches=[self.backend.cache_of(self.cache)]):
            q = self.backend.rope_store(qkv.flatten(1), norm, self.cos_sin, 0, 0)
        return q.view(len(qkv), self.heads, self.head_dim)

    def attend(self, q: torch.Tensor, sequences: list[tuple[int, int, int]]) -> torch.Tensor:
        """Attends to sequences, each given by its number, its tokens in the step and the length of
        its context."""
        tables = [self.table[self.offsets[n] : self.offsets[n + 1]] for n, _, _ in sequences]
        tensors = step_tensors(
            input_ids=np.zeros(len(q)),
            query_starts=np.cumsum([0, *(tokens for _, tokens, _ in sequences)]),
            context_lens=[context for _, _, context in sequences],
            block_table=np.concatenate(tables),
            table_offsets=np.cumsum([0, *map(len, tables)]),
        )
        with eager(tensors, caches=[self.backend.cache_of(self.cache)]):
            out = self.backend.attend(q.flatten(1), 0, 0, self.window)
        return out.view(len(q), self.heads, self.head_dim)

    def expected(self, q: torch.Tensor, n: int) -> torch.Tensor:
        """By torch in float64, from queries, and from the keys and values in the cache."""
        tokens, context = SEQUENCES[n]
        layout = self.layout()
        blocks = self.table[self.offsets[n] :]
        stored = [
            layout.stored(blocks[position // self.block_size], position % self.block_size)
            for position in range(context)
        ]
        k, v = (torch.from_numpy(np.stack(side)) for side in zip(*stored, strict=True))
        scale = self.head_dim**-0.5
        queries = q.double()
        if self.dtype == torch.bfloat16 and has("avx512bf16"):
            queries = (queries * scale).bfloat16().double() / scale
        if self.dtype == torch.int8:  # queries have codes of 8 bits too
            top = q.abs().amax(-1, keepdim=True)
            factor = torch.from_numpy(np.float32(127) / top.numpy())  # torch's quotient differs
            queries = (q * factor).round().double() * top / 127
        mask = torch.ones(tokens, context, dtype=torch.bool).tril(context - tokens)
        mask = mask.triu(context - tokens + 1 - (self.window or context))
        queries, k, v = (x.transpose(0, 1)[None] for x in (queries, k, v))
        seen = F.scaled_dot_product_attention(queries, k, v, attn_mask=mask, enable_gqa=True)
        return seen[0].transpose(0, 1).float()


def check(layer: Layer) -> None:
    """Attention equals torch's, and to the bit what it is for a sequence alone and in chunks."""
    layer.store([range(context - tokens) for tokens, context in SEQUENCES])
    q = layer.store([range(context - tokens, context) for tokens, context in SEQUENCES])
    out = layer.attend(q, [(n, *lengths) for n, lengths in enumerate(SEQUENCES)])
    ends = np.cumsum([tokens for tokens, _ in SEQUENCES])
    for n, (end, (tokens, context)) in enumerate(zip(ends, SEQUENCES, strict=True)):
        seen = out[end - tokens : end]
        expected = layer.expected(q[end - tokens : end], n)
        torch.testing.assert_close(seen, expected, rtol=1e-5, atol=ROUNDING[layer.dtype])
        for first, last in ((tokens - 1, tokens), (0, 1), (tokens // 3, tokens // 3 * 2)):
            part = q[end - tokens + first : end - tokens + last].clone()
            alone = layer.attend(part, [(n, last - first, context - tokens + last)])
            assert torch.equal(alone, seen[first:last]), (n, first, last)


def check_dtypes() -> None:
    for dtype in DTYPES:
        check(Layer(7, 1, 24, 16, dtype))
        check(Layer(4, 2, 128, 16, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "block_size"), SHAPES)
def test_equals_torch_alone_in_a_crowd_and_in_chunks(
    dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, block_size: int
) -> None:
    check(Layer(heads, kv_heads, head_dim, block_size, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [1, 15, 64, 300, 512])
def test_windows(dtype: torch.dtype, window: int) -> None:
    check(Layer(4, 2, 64, 16, dtype, window=window))
    check(Layer(6, 1, 40, 48, dtype, window=window))


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_small_weights_count_beside_a_large_one(dtype: torch.dtype) -> None:
    layer = Layer(1, 1, 16, 16, dtype, norm=None)
    layer.cos_sin = torch.tensor([[1.0], [0.0]]).expand(600, 2, 8).contiguous()
    n, (tokens, context) = 6, SEQUENCES[6]
    layer.qkv[n][:] = torch.tensor([1.3, 0.0, 1.0])[:, None]  # weight 1 after the next line
    layer.qkv[n][0, 1:] = torch.tensor([1.3, -1.0])[:, None]  # the first key has about 860
    layer.store([range(context - tokens) for tokens, context in SEQUENCES])
    q = layer.store([range(context - tokens, context) for tokens, context in SEQUENCES])
    ends = np.cumsum([tokens for tokens, _ in SEQUENCES])
    q = q[ends[n] - tokens : ends[n]].clone()
    out, expected = layer.attend(q, [(n, tokens, context)]), layer.expected(q, n)
    # With int8, the 63 that share the large one's scale are lost: 0.04.
    torch.testing.assert_close(out, expected, rtol=0, atol=0.05)


FROM_HERE = "from tests.worker_svc.kernels.cpu.test_attention import *; "


def test_an_older_cpu() -> None:
    run_as("avx2", FROM_HERE + "check(Layer(7, 1, 24, 16, torch.int8))")


@pytest.mark.soak
@pytest.mark.parametrize("cpu", CPUS)
def test_older_cpus(cpu: str) -> None:
    run_as(cpu, FROM_HERE + "check_dtypes()")


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_change_nothing(dtype: torch.dtype, threads: Callable[[int], None]) -> None:
    outs = []
    for members in (1, 2, 7):
        threads(members)
        layer = Layer(16, 8, 128, 16, dtype)
        q = layer.store([range(context) for _, context in SEQUENCES])
        out = layer.attend(q, [(n, context, context) for n, (_, context) in enumerate(SEQUENCES)])
        outs.append((q, layer.cache.view(torch.uint8), out))
    for out in outs[1:]:
        assert all(map(torch.equal, outs[0], out))


@pytest.mark.parametrize("norm", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "block_size"), SHAPES)
def test_stores_tokens_in_their_slots_only(
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    norm: torch.dtype | None,
) -> None:
    layer = Layer(heads, kv_heads, head_dim, block_size, dtype, norm=norm)
    qkv, positions, slots = layer.inputs([range(0, context, 7) for _, context in SEQUENCES])
    slots[::5] = -1
    q = layer.store_rows(qkv, positions, slots)
    x = qkv.double()
    if norm is not None:
        for number, part in enumerate((x[:, :heads], x[:, heads : heads + kv_heads])):
            part[...] = F.rms_norm(part, (head_dim,), layer.weights[number].double(), EPS)
    cos, sin = layer.cos_sin[torch.from_numpy(positions).long()].double()[:, None].unbind(2)
    first, second = x[:, : heads + kv_heads].chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    bounds = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(q, rotated[:, :heads].float(), **bounds)
    keys, values = rotated[:, heads:].numpy(), x[:, heads + kv_heads :].numpy()
    written = torch.zeros_like(layer.cache)
    layout, marks = layer.layout(), layer.layout(written)
    for n, place in enumerate(slots):
        if place < 0:
            continue
        block, slot = divmod(place, block_size)
        for side, (stored, row) in enumerate(
            zip(layout.stored(block, slot), (keys[n], values[n]), strict=True)
        ):
            # Half a code, or the eighth bit of a bfloat16.
            half = np.abs(row).max(axis=-1, keepdims=True) / 254
            relative = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.int8: 1e-5}[dtype]
            error = np.abs(stored - row)
            assert (
                error < 1e-5 + relative * np.abs(row) + (half if dtype == torch.int8 else 0)
            ).all()
            marks.scale(side, block, slot)[...] = 1
        marks.key(block, slot)[...] = 1
        marks.value(block, slot)[...] = 1
    assert (layer.cache[written == 0].view(torch.uint8) == 0xFF).all()
