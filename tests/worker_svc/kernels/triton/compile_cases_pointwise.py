"""Launches of the kernels around attention and of the sampler, with the sizes of Qwen3."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from tests.worker_svc.kernels.triton.compiled import Case
from worker_svc.kernels.logits import BINS
from worker_svc.kernels.ops import PlainWeight
from worker_svc.kernels.triton.advance import advance
from worker_svc.kernels.triton.embedding import embed
from worker_svc.kernels.triton.gated_activation import activate_and_multiply
from worker_svc.kernels.triton.quantized_cache import SCALE_BYTES
from worker_svc.kernels.triton.rms_norm import rms_norm, sum_rows
from worker_svc.kernels.triton.rope_store import rope_store
from worker_svc.kernels.triton.sampling.filtering import pick_bins, weigh_by_key
from worker_svc.kernels.triton.sampling.selection import chunk_statistics, select_tokens
from worker_svc.kernels.triton.sampling.token_history import penalize, store_tokens
from worker_svc.kernels.triton.sampling.token_masks import apply_masks
from worker_svc.layers.embedding import VocabPartition
from worker_svc.step.tensors import unpack

TOKENS = 3
VOCAB_SIZE = 151_936
HEAD_DIM = 128


@dataclass(frozen=True)
class Shape:
    """One rank's part of a model."""

    name: str
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    ranks: int


SHAPES = (
    Shape("0.6B", hidden=1024, intermediate=3072, heads=16, kv_heads=8, ranks=1),
    Shape("8B", hidden=4096, intermediate=12288, heads=32, kv_heads=8, ranks=1),
    Shape("32B TP 4", hidden=5120, intermediate=6400, heads=16, kv_heads=2, ranks=4),
)


def empty(*size: int, dtype: torch.dtype) -> torch.Tensor:
    """Makes a tensor without memory: a real cache is larger than this machine's."""
    return torch.empty(size, dtype=dtype, device="meta")


def launches(shape: Shape, dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], object]]]:
    half, ints = partial(empty, dtype=dtype), partial(empty, dtype=torch.int32)
    floats = partial(empty, dtype=torch.float32)
    x, weight = half(TOKENS, shape.hidden), half(shape.hidden)
    yield "sum_rows", partial(sum_rows, empty(3, 297, dtype=torch.float64))
    yield "rms_norm", partial(rms_norm, x, None, weight, 1e-6)
    yield "add_rms_norm", partial(rms_norm, x, x, weight, 1e-6)
    gate_up = half(TOKENS, 2 * shape.intermediate)
    for activation in ("silu", "gelu_tanh"):
        yield activation, partial(activate_and_multiply, gate_up, activation)

    qkv = half(TOKENS, (shape.heads + 2 * shape.kv_heads) * HEAD_DIM)
    blocks = 2**31 // (16 * shape.kv_heads * HEAD_DIM) + 1
    cache = half(2, blocks, 16, shape.kv_heads, HEAD_DIM)
    int8 = empty(2, 3, 16, shape.kv_heads, HEAD_DIM + SCALE_BYTES, dtype=torch.int8)
    fp8 = int8.view(torch.uint8)
    norm = half(HEAD_DIM), half(HEAD_DIM), 1e-6
    angles, rows = floats(40960, 2, HEAD_DIM // 2), ints(TOKENS)
    stores = {"": cache, " int8": int8, " fp8": fp8}
    for name, each in stores.items():
        store = partial(rope_store, qkv, shape.heads, norm, angles, rows, rows, each)
        yield f"rope_store{name}", store
    plain = partial(rope_store, qkv, shape.heads, None, angles, rows, rows, cache)
    yield "rope_store without a norm", plain

    vocab = VocabPartition(VOCAB_SIZE, shape.ranks - 1, shape.ranks)
    table = PlainWeight(half(vocab.shard_size, shape.hidden))
    yield "embed", partial(embed, rows, rows, table, vocab.start, vocab.num_tokens)
    yield from sampler_launches(vocab, dtype)


def sampler_launches(
    vocab: VocabPartition, dtype: torch.dtype
) -> Iterator[tuple[str, Callable[[], object]]]:
    chunks = empty(TOKENS, vocab.shard_size, dtype=dtype), vocab.chunk_size, vocab.num_tokens
    temperatures = empty(TOKENS, dtype=torch.float32)
    yield "chunk_statistics", partial(chunk_statistics, *chunks, temperatures)
    sums = empty(TOKENS, vocab.num_chunks * vocab.ranks, dtype=torch.float32)
    uniforms = empty(TOKENS, dtype=torch.float64)
    selection = sums, sums, vocab.rank * vocab.num_chunks, temperatures, uniforms
    yield "select_tokens", partial(select_tokens, *chunks, *selection)


def feature_launches(ranks: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """Launches on float32 logits, whatever the model's type. The columns of a step are views of a
    buffer; each case has some of any alignment."""
    vocab = VocabPartition(VOCAB_SIZE, ranks - 1, ranks)
    logits = empty(TOKENS, vocab.shard_size, dtype=torch.float32)
    part, tokens = (vocab.start, vocab.num_tokens), empty(2**20, dtype=torch.int32)
    bins = torch.zeros(TOKENS, BINS, dtype=torch.int64)

    def column(offset: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(TOKENS + offset, dtype=dtype)[offset:]

    def launch(n: int) -> Iterator[tuple[str, Callable[[], object]]]:
        ints, longs, floats = map(partial(column, n), (torch.int32, torch.int64, torch.float32))
        yield "store_tokens", partial(store_tokens, tokens, ints, ints, ints)
        history = [ints] * 5
        values = [floats] * 3
        yield "penalize", partial(penalize, logits, *part, tokens, 16, *history, *values)
        masks = torch.zeros(TOKENS * 7 + n, dtype=torch.int32)[n:].view(TOKENS, 7)
        yield "apply_masks", partial(apply_masks, logits, *part, ints, masks)
        search = (longs, longs, bins)
        yield "count_by_key", partial(weigh_by_key, logits, ints, part[1], None, None, *search)
        weights = (ints, part[1], floats, floats)
        yield "weigh_by_key", partial(weigh_by_key, logits, *weights, *search)
        yield "pick_bins", partial(pick_bins, bins, longs, longs, longs, longs)
        yield from sampler_launches(vocab, torch.float32)

    for (name, first), *others in zip(*map(launch, (0, 1, 4)), strict=True):
        launches = [first, *(other for _, other in others)]
        yield f"{name} TP {ranks}", partial(_all, launches)


def _all(launches: list[Callable[[], object]]) -> None:
    for launch in launches:
        launch()


CASES = [
    Case(f"{name} {shape.name} {str(dtype).removeprefix('torch.')}", launch)
    for dtype in (torch.bfloat16, torch.float16)
    for shape in SHAPES
    for name, launch in launches(shape, dtype)
]
CASES += [Case(name, launch) for ranks in (1, 2) for name, launch in feature_launches(ranks)]
STEP = unpack(torch.zeros(2**14, dtype=torch.uint8), [TOKENS] * 12)
CASES += [Case(f"advance, blocks of {size}", partial(advance, STEP, size)) for size in (16, 256)]
# Chunks of one token or two, as tests have them.
CASES += [
    Case(f"{name}, vocabulary of {n}", launch)
    for n in (2, 7)
    for name, launch in sampler_launches(VocabPartition(n, 0, 1), torch.float32)
]
