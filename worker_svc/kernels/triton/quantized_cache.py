"""Keys and values in 8 bits, in a paged cache [2, blocks, block_size, kv_heads, bytes of a head].

A cache holds codes and, for each token and KV head, a scale, with which the largest magnitude has
the largest code. Its last dimension counts head_dim codes and 4 bytes of a scale. But in a block
all codes [block_size, kv_heads, head_dim] come first, where they are aligned, and then the scales,
float32 [kv_heads, block_size]. A block can be copied without regard to this.

Codes of dtype int8 reach 127. Those of dtype uint8 are the bits of float8_e4m3fn, which reach 448
and are more precise for small numbers. Where the GPU can convert these bits, attention reads the
cache as a tensor of dtype float8_e4m3fn.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from worker_svc.kernels.triton.codes import from_e4m3, round_to_even, to_e4m3

SCALE_BYTES = 4
# A power of two on the scales of fp8 values, which largest codes of 448 make small. Multiplied by
# an attention weight, they may go into a product in float16, below whose range they would be 0.
VALUE_FACTOR = tl.constexpr(1024.0)


def head_size(cache: torch.Tensor) -> int:
    """head_dim of a cache of any dtype."""
    return cache.shape[4] - (SCALE_BYTES if cache.dtype.itemsize == 1 else 0)


@triton.jit
def numbers_of(codes: tl.tensor, DOT: tl.constexpr) -> tl.tensor:
    """Elements of a cache of any dtype as numbers in DOT, to which scales are not applied yet. The
    bits of fp8 are divided by 256."""
    if codes.dtype == tl.uint8:
        return from_e4m3(codes, DOT)
    return codes.to(DOT)


@triton.jit
def block_scales(
    plane: tl.tensor,
    kv_head: tl.tensor,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
) -> tl.tensor:
    """The address of a KV head's scales in the first block of a plane of an 8-bit cache."""
    scales = plane.to(tl.pointer_type(tl.float32))
    return scales + BLOCK_SIZE * KV_HEADS * HEAD_DIM // 4 + kv_head * BLOCK_SIZE


@triton.jit
def scale_offsets(
    block: tl.tensor,
    start: tl.tensor,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """The result of `block_of` for the tile at `start` -> the offsets of the tile's scales from
    `block_scales`, int64 [TILE]."""
    size: tl.constexpr = BLOCK_SIZE * KV_HEADS * (HEAD_DIM // 4 + 1)
    if BLOCK_SIZE % TILE == 0:
        return (block.to(tl.int64) * size + start % BLOCK_SIZE) + tl.arange(0, TILE)
    else:
        return block.to(tl.int64) * size + (start + tl.arange(0, TILE)) % BLOCK_SIZE


@triton.jit
def skipped_scales(
    block: tl.tensor, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr
) -> tl.tensor:
    """The result of `block_of` for a tile -> bytes of scales in the blocks before, int64 [TILE]."""
    return block.to(tl.int64) * (BLOCK_SIZE * KV_HEADS * 4) + tl.zeros([TILE], tl.int64)


@triton.jit
def store_codes(
    plane: tl.tensor,
    slot: tl.tensor,
    head: tl.tensor,
    columns: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    mask: tl.tensor,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
) -> None:
    """Stores both halves of some heads of a token, float32 [heads, half], in `slot` (−1: nowhere)
    of the planes [heads, 1] of an 8-bit cache. The halves must be 0 outside of `mask`."""
    mask = mask & (slot >= 0)
    place = slot.to(tl.int64)
    offsets = (place * KV_HEADS + head) * HEAD_DIM + columns
    half: tl.constexpr = HEAD_DIM // 2
    block = place // BLOCK_SIZE
    offsets += block * (BLOCK_SIZE * KV_HEADS * 4)
    FP8: tl.constexpr = plane.dtype.element_ty == tl.uint8
    LARGEST: tl.constexpr = 448.0 if FP8 else 127.0
    top = tl.maximum(tl.max(tl.abs(first), 1), tl.max(tl.abs(second), 1))[:, None]
    factor = tl.where(top > 0, LARGEST / tl.where(top > 0, top, 1.0), 0.0)
    first, second = first * factor, second * factor
    if FP8:
        tl.store(plane + offsets, to_e4m3(first), mask=mask)
        tl.store(plane + offsets + half, to_e4m3(second), mask=mask)
    else:
        tl.store(plane + offsets, round_to_even(first).to(tl.int8), mask=mask)
        tl.store(plane + offsets + half, round_to_even(second).to(tl.int8), mask=mask)
    scales = block_scales(plane, head, KV_HEADS, HEAD_DIM, BLOCK_SIZE)
    size: tl.constexpr = BLOCK_SIZE * KV_HEADS * (HEAD_DIM // 4 + 1)
    scales += block * size + place % BLOCK_SIZE
    tl.store(scales, top / LARGEST, mask=tl.max(mask.to(tl.int32), 1)[:, None] > 0)
