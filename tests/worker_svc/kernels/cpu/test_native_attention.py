from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from worker_svc.kernels.cpu.kv_store import cache_row

from tests.worker_svc.kernels.cpu.native_library import (
    AttendArgs,
    NativeCache,
    NativeStep,
    RopeStoreArgs,
    address,
    int32s,
    library,
    team,
)
from worker_svc.kernels.cpu_features import has

EPS = 1e-6
SOURCES = ("kv_store.cpp", "attention.cpp")
# Tokens of the step and of the context: decodes, prompts, parts of prompts, several chunks of keys.
SEQUENCES = [(1, 1), (1, 3), (1, 17), (5, 5), (7, 40), (33, 300), (1, 600), (64, 64)]
DTYPES = (np.float32, np.uint16, np.int8)
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
# What the rounding of weights changes. Those of bfloat16 have 8 bits, and those of int8 have 16.
ROUNDING = {np.float32: 1e-5, np.uint16: 1e-2, np.int8: 1e-3}


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
    dtype: type[np.generic]
    machine: str = "native"
    threads: int = 2
    norm: type[np.generic] | None = np.float32

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
        size = cache_row(self.block_size, self.head_dim, scaled=self.dtype is np.int8)
        self.cache = np.empty((2, sum(blocks), self.kv_heads, size), self.dtype)
        self.cache.view(np.uint8)[...] = 0xFF

    def weight(self, number: int) -> np.ndarray | None:
        if self.norm is None:
            return None
        weight = self.weights[number]
        if self.norm is np.uint16:
            return weight.view(torch.uint16).numpy()
        return weight.float().numpy()

    def inputs(self, parts: list[range]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """qkv, positions and slots of these positions of each sequence."""
        qkv = torch.cat([whole[list(part)] for whole, part in zip(self.qkv, parts, strict=True)])
        slots = []
        for first, part in zip(self.offsets[:-1], parts, strict=True):
            positions = np.array(part, np.int64)
            blocks = self.table[first + positions // self.block_size]
            slots.append(blocks * self.block_size + positions % self.block_size)
        return qkv.numpy(), int32s(np.concatenate(parts)), int32s(np.concatenate(slots))

    def store(self, parts: list[range]) -> np.ndarray:
        """Stores these positions of each sequence -> their queries."""
        return self.store_rows(*self.inputs(parts))

    def store_rows(self, qkv: np.ndarray, positions: np.ndarray, slots: np.ndarray) -> np.ndarray:
        q = np.full((len(qkv), self.heads, self.head_dim), np.nan, np.float32)
        q_weight, k_weight = self.weight(0), self.weight(1)
        args = RopeStoreArgs(
            NativeCache.of(self.cache, self.block_size, self.head_dim),
            address(qkv),
            address(q),
            self.heads,
            address(q_weight),
            address(k_weight),
            int(self.norm is np.uint16),
            EPS,
            address(self.cos_sin.numpy()),
        )
        step = NativeStep(tokens=len(qkv), positions=address(positions), slots=address(slots))
        self.call("nano_rope_store", args, step)
        return q

    def attend(self, q: np.ndarray, sequences: list[int], query_lens: list[int]) -> torch.Tensor:
        """Attends to the ends of sequences, from the last ones of their tokens."""
        contexts = [SEQUENCES[n][1] for n in sequences]
        return self.attend_to(q, sequences, query_lens, contexts)

    def attend_to(
        self, q: np.ndarray, sequences: list[int], query_lens: list[int], contexts: list[int]
    ) -> torch.Tensor:
        out = np.full(q.shape, np.nan, np.float32)
        tables = [self.table[self.offsets[n] : self.offsets[n + 1]] for n in sequences]
        columns = {
            "query_starts": int32s(np.cumsum([0, *query_lens])),
            "context_lens": int32s(contexts),
            "block_table": int32s(np.concatenate(tables)),
            "table_offsets": int32s(np.cumsum([0, *map(len, tables)])),
        }
        args = AttendArgs(
            NativeCache.of(self.cache, self.block_size, self.head_dim),
            address(q),
            address(out),
            self.heads,
            self.head_dim**-0.5,
        )
        addresses = {name: address(column) for name, column in columns.items()}
        step = NativeStep(tokens=len(q), sequences=len(sequences), **addresses)
        self.call("nano_attend", args, step)
        return torch.from_numpy(out)

    def call(self, name: str, args: ctypes.Structure, step: NativeStep) -> None:
        function = getattr(library(self.machine, *SOURCES), name)
        members = team(self.machine, self.threads, *SOURCES)
        function(members, self.threads, ctypes.byref(args), ctypes.byref(step))

    def expected(self, q: np.ndarray, n: int) -> torch.Tensor:
        """By torch in float64, from queries, and from the keys and values in the cache."""
        tokens, context = SEQUENCES[n]
        layout = Layout(self.cache, self.block_size, self.head_dim)
        blocks = self.table[self.offsets[n] :]
        stored = [
            layout.stored(blocks[position // self.block_size], position % self.block_size)
            for position in range(context)
        ]
        k, v = (torch.from_numpy(np.stack(side)) for side in zip(*stored, strict=True))
        scale = self.head_dim**-0.5
        queries = torch.from_numpy(q).double()
        if self.dtype is np.uint16 and self.machine == "native" and has("avx512bf16"):
            queries = (queries * scale).bfloat16().double() / scale
        mask = torch.ones(tokens, context, dtype=torch.bool).tril(context - tokens)
        queries, k, v = (x.transpose(0, 1)[None] for x in (queries, k, v))
        seen = F.scaled_dot_product_attention(queries, k, v, attn_mask=mask, enable_gqa=True)
        return seen[0].transpose(0, 1).float()


def check(layer: Layer) -> None:
    """Attention equals torch's, and to the bit what it is for a sequence alone and in chunks."""
    layer.store([range(context - tokens) for tokens, context in SEQUENCES])
    q = layer.store([range(context - tokens, context) for tokens, context in SEQUENCES])
    query_lens = [tokens for tokens, _ in SEQUENCES]
    out = layer.attend(q, list(range(len(SEQUENCES))), query_lens)
    ends = np.cumsum(query_lens)
    for n, (end, tokens) in enumerate(zip(ends, query_lens, strict=True)):
        seen, context = out[end - tokens : end], SEQUENCES[n][1]
        expected = layer.expected(q[end - tokens : end], n)
        torch.testing.assert_close(seen, expected, rtol=1e-5, atol=ROUNDING[layer.dtype])
        for first, last in ((tokens - 1, tokens), (0, 1), (tokens // 3, tokens // 3 * 2)):
            part = q[end - tokens + first : end - tokens + last].copy()
            alone = layer.attend_to(part, [n], [last - first], [context - tokens + last])
            assert torch.equal(alone, seen[first:last]), (n, first, last)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "block_size"), SHAPES)
def test_equals_torch_alone_in_a_crowd_and_in_chunks(
    dtype: type[np.generic], heads: int, kv_heads: int, head_dim: int, block_size: int
) -> None:
    check(Layer(heads, kv_heads, head_dim, block_size, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("machine", ["avx2", "skylake-avx512", "generic"])
def test_older_machines(machine: str, dtype: type[np.generic]) -> None:
    check(Layer(7, 1, 24, 16, dtype, machine=machine))
    check(Layer(4, 2, 128, 16, dtype, machine=machine))


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_change_nothing(dtype: type[np.generic]) -> None:
    layers = [Layer(16, 8, 128, 16, dtype, threads=threads) for threads in (1, 2)]
    whole = [range(context) for _, context in SEQUENCES]
    queries = [layer.store(whole) for layer in layers]
    np.testing.assert_array_equal(*queries)
    np.testing.assert_array_equal(*(layer.cache for layer in layers))
    outs = [
        layer.attend_to(
            q, list(range(len(whole))), [len(x) for x in whole], [len(x) for x in whole]
        )
        for layer, q in zip(layers, queries, strict=True)
    ]
    assert torch.equal(*outs)


@pytest.mark.parametrize("norm", [None, np.float32, np.uint16])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "block_size"), SHAPES)
def test_stores_tokens_in_their_slots_only(
    dtype: type[np.generic],
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    norm: type[np.generic] | None,
) -> None:
    layer = Layer(heads, kv_heads, head_dim, block_size, dtype, norm=norm)
    qkv, positions, slots = layer.inputs([range(0, context, 7) for _, context in SEQUENCES])
    slots[::5] = -1
    q = layer.store_rows(qkv, positions, slots)
    x = torch.from_numpy(qkv).double()
    if norm is not None:
        for number, part in enumerate((x[:, :heads], x[:, heads : heads + kv_heads])):
            part[...] = F.rms_norm(part, (head_dim,), layer.weights[number].double(), EPS)
    cos, sin = layer.cos_sin[torch.from_numpy(positions).long()].double()[:, None].unbind(2)
    first, second = x[:, : heads + kv_heads].chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    bounds = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(torch.from_numpy(q), rotated[:, :heads].float(), **bounds)
    keys, values = rotated[:, heads:].numpy(), x[:, heads + kv_heads :].numpy()
    written = np.zeros_like(layer.cache)
    layout, marks = (Layout(cache, block_size, head_dim) for cache in (layer.cache, written))
    for n, place in enumerate(slots):
        if place < 0:
            continue
        block, slot = divmod(place, block_size)
        for side, (stored, row) in enumerate(
            zip(layout.stored(block, slot), (keys[n], values[n]), strict=True)
        ):
            # Half a code, or the eighth bit of a bfloat16.
            half = np.abs(row).max(axis=-1, keepdims=True) / 254
            relative = {np.float32: 1e-5, np.uint16: 2**-8, np.int8: 1e-5}[dtype]
            error = np.abs(stored - row)
            assert (error < 1e-5 + relative * np.abs(row) + (half if dtype is np.int8 else 0)).all()
            marks.scale(side, block, slot)[...] = 1
        marks.key(block, slot)[...] = 1
        marks.value(block, slot)[...] = 1
    assert (layer.cache[written == 0].view(np.uint8) == 0xFF).all()
