"""Products of numbers with codes, which become numbers in registers (W4A16, W8A16)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from worker_svc.kernels.triton import batch_invariance
from worker_svc.kernels.triton.codes import from_e4m3
from worker_svc.kernels.triton.launch import kernel
from worker_svc.kernels.triton.paged_attention import dot_dtype
from worker_svc.kernels.triton.quantized.products import (
    PARALLEL_ROWS,
    SPLIT_ROWS,
    Grouped,
    choose_splits,
    choose_tiles,
    combine,
    room_for_parts,
    store_part,
    store_sums,
)


def code_matmul(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
    group: int,
    width: int,
    grouped: Grouped | None = None,
) -> torch.Tensor:
    """x ((code − zero) · scale)ᵀ + bias [out] -> [T, out] in the dtype of x, for x [T, in].

    A group's (code − zero) are exact in any dtype. The kernel multiplies them by x, and multiplies
    their float32 sum by the scale.

        codes   contiguous, with a row per output: int8 or the bits of float8_e4m3fn as uint8, one
                per input; or int4 as uint8 [out, tiles, width], see `pack_int4`
        scales  [groups, out] of any float dtype
        zeros   int16 [groups, out]; None for 0, or 8 for int4
        group   columns that share a scale
        width   bytes of a row in a tile: a power of two of at least 16, which divides group unless
                there is only one group
        grouped then codes, scales and zeros have one more dimension, of matrices
    """
    rows, columns = x.shape
    one = codes if grouped is None else codes[0]
    outs, int4 = len(one), one.dim() == 3
    out = torch.empty(rows, outs, dtype=x.dtype, device=x.device)
    x = x.contiguous()
    tiles = grouped.tiles if grouped else choose_tiles(rows, x.dtype)
    column_tiles = triton.cdiv(columns, 2 * width if int4 else width)
    of_rows = min(rows, SPLIT_ROWS) if batch_invariance.is_on() else rows
    splits = 1 if grouped else choose_splits(of_rows, outs, column_tiles)
    loops = rows > PARALLEL_ROWS and splits > 1
    programs = 1 if loops else splits
    parts = room_for_parts(out, programs, torch.float32)
    _code_kernel[(triton.cdiv(outs, tiles.outs), triton.cdiv(rows, tiles.rows), programs)](
        x,
        codes,
        scales,
        zeros,
        bias,
        parts,
        grouped.matrices if grouped else None,
        rows,
        COLUMNS=columns,
        ALL_OUTS=outs,
        GROUP=group,
        GROUPS=scales.shape[-2],
        INT4=int4,
        ROWS=tiles.rows,
        OUTS=tiles.outs,
        WIDTH=width,
        SPLITS=splits,
        LOOPS=loops,
        DOT=dot_dtype(x.dtype),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    if programs > 1:
        combine(parts, None, None, bias, out)
    return out


def pack_int4(codes: torch.Tensor, width: int) -> torch.Tensor:
    """Codes 0 to 15, uint8 [out, in] -> uint8 [out, tiles, width]. Byte j of a tile of 2 · width
    columns has column j in its low half and column width + j in its high half, so that both halves
    are multiplied by neighbours in x. The padding is zeros, which are multiplied by no x."""
    columns = codes.shape[1]
    padding = -columns % (2 * width)
    tiles = F.pad(codes, (0, padding)).unflatten(1, (-1, 2, width))
    packed: torch.Tensor = tiles[:, :, 0] | tiles[:, :, 1] << 4
    return packed


@triton.jit
def _numbers(codes: tl.tensor, zero: tl.tensor, INT4: tl.constexpr, DOT: tl.constexpr) -> tl.tensor:
    """Codes [OUTS, WIDTH] minus zeros [OUTS, 1], if there are zeros, in the type DOT."""
    if codes.dtype == tl.uint8 and not INT4:
        return from_e4m3(codes, DOT)
    if INT4:
        # The code becomes the low bits of a power of two, so the number is the power plus the code.
        if DOT == tl.bfloat16:  # noqa: SIM300
            shifted = (codes.to(tl.uint16) | 0x4300).to(DOT, bitcast=True)
            return shifted - (zero + 128.0).to(DOT)
        if DOT == tl.float16:  # noqa: SIM300
            shifted = (codes.to(tl.uint16) | 0x6400).to(DOT, bitcast=True)
            return shifted - (zero + 1024.0).to(DOT)
    return (codes.to(tl.float32) - zero).to(DOT)


@triton.jit
def _zeros(
    zeros: tl.tensor,
    group: tl.tensor,
    n: tl.tensor,
    ALL_OUTS: tl.constexpr,
    OUTS: tl.constexpr,
    INT4: tl.constexpr,
) -> tl.tensor:
    """Zeros of a group, float32 [OUTS, 1]."""
    if zeros is not None:
        return tl.load(zeros + group * ALL_OUTS + n).to(tl.float32)[:, None]
    else:
        return tl.full([OUTS, 1], 8.0 if INT4 else 0.0, tl.float32)


@triton.jit
def _part_sums(
    rows_of_x: tl.tensor,
    rows_of_codes: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    real_n: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    COLUMNS: tl.constexpr,
    ALL_OUTS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    INT4: tl.constexpr,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
    WIDTH: tl.constexpr,
    DOT: tl.constexpr,
) -> tl.tensor:
    """Multiplies the tiles [first, last) of columns -> sums [OUTS, ROWS] float32."""
    tile_columns: tl.constexpr = 2 * WIDTH if INT4 else WIDTH
    one_group: tl.constexpr = GROUPS == 1 or GROUP % tile_columns == 0  # in any tile
    padded: tl.constexpr = COLUMNS % tile_columns != 0
    column = tl.arange(0, WIDTH)
    sums = tl.zeros([OUTS, ROWS], tl.float32)
    for tile in range(first, last):
        k = tile * tile_columns + column
        group = 0 if GROUPS == 1 else tile * tile_columns // GROUP
        scale = tl.load(scales + group * ALL_OUTS + real_n).to(tl.float32)[:, None]
        zero = _zeros(zeros, group, real_n, ALL_OUTS, OUTS, INT4)
        place = tile * WIDTH + column
        if INT4 or not padded:
            code = tl.load(rows_of_codes + place[None, :])
        else:
            code = tl.load(rows_of_codes + place[None, :], mask=(k < COLUMNS)[None, :], other=0)
        if padded:
            x_t = tl.load(rows_of_x + k[:, None], mask=(k < COLUMNS)[:, None], other=0)
        else:
            x_t = tl.load(rows_of_x + k[:, None])
        if INT4:
            second = k + WIDTH
            if padded:
                mask = (second < COLUMNS)[:, None]
                x_2 = tl.load(rows_of_x + second[:, None], mask=mask, other=0)
            else:
                x_2 = tl.load(rows_of_x + second[:, None])
            low = _numbers(code & 15, zero, INT4, DOT)
            product = tl.dot(low, x_t.to(DOT), input_precision="ieee")
            if one_group:
                high = _numbers(code >> 4, zero, INT4, DOT)
                product = tl.dot(high, x_2.to(DOT), product, input_precision="ieee")
                sums += product * scale
            else:
                sums += product * scale
                next_group = tl.minimum((tile * tile_columns + WIDTH) // GROUP, GROUPS - 1)
                scale = tl.load(scales + next_group * ALL_OUTS + real_n).to(tl.float32)[:, None]
                zero = _zeros(zeros, next_group, real_n, ALL_OUTS, OUTS, INT4)
                high = _numbers(code >> 4, zero, INT4, DOT)
                sums += tl.dot(high, x_2.to(DOT), input_precision="ieee") * scale
        else:
            number = _numbers(code, zero, INT4, DOT)
            product = tl.dot(number, x_t.to(DOT), input_precision="ieee")
            sums += product * scale
    return sums


@kernel(do_not_specialize=["rows"])
def _code_kernel(
    x: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    matrices: tl.tensor,
    rows: tl.tensor,
    COLUMNS: tl.constexpr,
    ALL_OUTS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    INT4: tl.constexpr,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
    LOOPS: tl.constexpr,
    DOT: tl.constexpr,
) -> None:
    """Grid (tiles of outputs, tiles of rows, splits), or without splits if a program LOOPS over
    them."""
    tile_columns: tl.constexpr = 2 * WIDTH if INT4 else WIDTH
    tiles: tl.constexpr = (COLUMNS + tile_columns - 1) // tile_columns
    row_bytes: tl.constexpr = tiles * WIDTH if INT4 else COLUMNS

    n = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    m = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    part = tl.program_id(2)
    # Rows beyond the last are computed from the last row and not stored.
    real_n = tl.minimum(n, ALL_OUTS - 1)
    first, last = tiles * part // SPLITS, tiles * (part + 1) // SPLITS
    if matrices is not None:
        matrix = tl.load(matrices + tl.program_id(1)).to(tl.int64)
        last = tl.where(matrix < 0, first, last)
        matrix = tl.maximum(matrix, 0)
        codes += matrix * ALL_OUTS * row_bytes
        scales += matrix * GROUPS * ALL_OUTS
        if zeros is not None:
            zeros += matrix * GROUPS * ALL_OUTS
    rows_of_codes = codes + real_n.to(tl.int64)[:, None] * row_bytes
    rows_of_x = x + tl.minimum(m, rows - 1).to(tl.int64)[None, :] * COLUMNS
    if LOOPS:
        sums = tl.zeros([OUTS, ROWS], tl.float32)
        for each in range(SPLITS):
            sums += _part_sums(
                rows_of_x, rows_of_codes, scales, zeros, real_n,
                tiles * each // SPLITS, tiles * (each + 1) // SPLITS,
                COLUMNS, ALL_OUTS, GROUP, GROUPS, INT4, ROWS, OUTS, WIDTH, DOT,
            )  # fmt: skip
    else:
        sums = _part_sums(
            rows_of_x, rows_of_codes, scales, zeros, real_n, first, last,
            COLUMNS, ALL_OUTS, GROUP, GROUPS, INT4, ROWS, OUTS, WIDTH, DOT,
        )  # fmt: skip
    if codes.dtype.element_ty == tl.uint8 and not INT4:
        sums = sums * 256.0  # see `from_e4m3`
    if SPLITS == 1 or LOOPS:
        store_sums(sums, None, None, bias, out, m, n, rows, ALL_OUTS)
    else:
        store_part(sums, out, part, m, n, rows, ALL_OUTS)
