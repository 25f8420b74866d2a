"""Whether the bits of a row may depend on the other rows of a step (`BATCH_INVARIANT`).

If not, a weight's products run in one kernel, whose tiles and parts depend on its shape and dtype
alone, and all attention in another, which divides each sequence into parts of `SEGMENT` positions.
cuBLAS and FlashAttention choose by the number of rows and sequences.
"""

from __future__ import annotations

import triton
import triton.language as tl

from worker_svc.kernels.triton.launch import kernel
from worker_svc.kernels.triton.paged_attention import UNALIGNED
from worker_svc.kernels.triton.quantized_cache import VALUE_FACTOR

SEGMENT = 2048  # positions; a multiple of all tiles

_on = False


def switch(on: bool) -> None:
    """Sets it for this process. Call it before weights are packed."""
    global _on
    _on = on


def is_on() -> bool:
    return _on


@triton.jit
def merge(
    top: tl.tensor,
    total: tl.tensor,
    acc: tl.tensor,
    part_top: tl.tensor,
    part_total: tl.tensor,
    part_acc: tl.tensor,
) -> tl.tensor:
    """Continues online softmaxes [ROWS] by those of a later part, with equal roundings wherever it
    is called."""
    new_top = tl.maximum(top, part_top)
    finite = tl.where(new_top == float("-inf"), 0.0, new_top)  # nothing has been seen yet
    old, new = tl.exp2(top - finite), tl.exp2(part_top - finite)
    total = tl.fma(total, old, part_total * new)
    acc = tl.fma(acc, old[:, None], part_acc * new[:, None])
    return new_top, total, acc


@triton.jit
def result_of(total: tl.tensor, acc: tl.tensor, CACHE: tl.constexpr) -> tl.tensor:
    """The results of softmaxes over values of type CACHE."""
    if tl.uint8 == CACHE:
        acc *= 256.0  # see `numbers_of`
    if CACHE.primitive_bitwidth == 8 and tl.int8 != CACHE:
        acc /= VALUE_FACTOR
    total = tl.where(total == 0, 1, total)  # 0 in the tiles of a sequence without tokens
    return acc / total[:, None]


@kernel(do_not_specialize=["parts"], do_not_specialize_on_alignment=UNALIGNED)
def merge_parts_kernel(
    partials: tl.tensor,
    tiles: tl.tensor,
    query_starts: tl.tensor,
    context_lens: tl.tensor,
    cache: tl.tensor,
    out: tl.tensor,
    parts: tl.tensor,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    PARTIAL_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SEGMENT: tl.constexpr,
) -> None:
    """Merges the parts of one head of the token of a tile, in order; grid (heads, tiles). Reads no
    more of the cache than its type."""
    head, tile = tl.program_id(0), tl.program_id(1)
    seq = tl.load(tiles + 2 * tile)
    query = tl.load(query_starts + seq).to(tl.int64)
    context = tl.load(context_lens + seq)
    first_seen = tl.maximum(context - WINDOW, 0) if WINDOW > 0 else 0
    existing = tl.cdiv(context, SEGMENT) - first_seen // SEGMENT
    one, dim = tl.arange(0, 1), tl.arange(0, DIMS)[None, :]
    top = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, DIMS], tl.float32)
    row = (tile * HEADS + head).to(tl.int64) * parts * PARTIAL_SIZE
    for part in range(0, existing):
        place = partials + row + part * PARTIAL_SIZE
        part_acc = tl.load(place + dim, mask=dim < HEAD_DIM, other=0.0)
        part_top = tl.load(place + HEAD_DIM + one)
        part_total = tl.load(place + HEAD_DIM + 1 + one)
        top, total, acc = merge(top, total, acc, part_top, part_total, part_acc)
    result = result_of(total, acc, cache.dtype.element_ty)
    place = out + (query * HEADS + head) * HEAD_DIM + dim
    tl.store(place, result.to(out.dtype.element_ty), mask=dim < HEAD_DIM)
