"""Products with quantized weights: 8-bit integers times 8-bit integers (W8A8), and numbers times
codes that become numbers in registers (W4A16, W8A16).

The weight is the left operand and x, transposed, the right one: of the tensor cores' operands, the
left is the one that may come from registers and that is 64 rows high, whereas steps that decode
have few rows of x.

Few rows of x are bounded by the bandwidth at which the weight is read, once. If its rows make fewer
tiles than keep a GPU busy, columns are split too, and a second kernel adds the parts up in order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from worker_svc.kernels.triton.codes import from_e4m3
from worker_svc.kernels.triton.launch import INTERPRETED, kernel
from worker_svc.kernels.triton.paged_attention import dot_dtype

SPLIT_ROWS = 64  # of x, at most: with more, tiles are many and the parts' sums large
# Two for each multiprocessor of an H100 or H200. The same for every GPU, so that all of them add up
# the same parts.
PROGRAMS = 264
MAX_SPLITS = 16
COMBINED = 512  # numbers that a program of the second kernel adds up


@dataclass(frozen=True)
class Tiles:
    """A program multiplies `outs` rows of the weight with `rows` rows of x."""

    rows: int
    outs: int
    num_warps: int
    num_stages: int


# For up to so many rows of x; more take the last. The columns of a tile do not depend on the number
# of rows, so neither does the order in which a row's products are added up, but for the splits.
TILES = (
    (16, Tiles(rows=16, outs=64, num_warps=4, num_stages=5)),
    (256, Tiles(rows=64, outs=64, num_warps=4, num_stages=4)),
)
LARGE_TILES = Tiles(rows=128, outs=128, num_warps=8, num_stages=3)
# Tensor cores do not multiply float32, which only comparisons use.
FLOAT32_TILES = Tiles(rows=16, outs=16, num_warps=4, num_stages=2)
INT8_COLUMNS = 128  # of a tile


def choose_tiles(rows: int, dtype: torch.dtype) -> Tiles:
    """For `rows` rows of x of the type that is multiplied."""
    if dtype == torch.float32 and not INTERPRETED:
        return FLOAT32_TILES
    return next((tiles for limit, tiles in TILES if rows <= limit), LARGE_TILES)


def choose_splits(rows: int, out_features: int, column_tiles: int) -> int:
    """Parts of the columns, each of two tiles or more. The same for all numbers of rows that are
    split at all."""
    if rows > SPLIT_ROWS:
        return 1
    wanted = PROGRAMS // -(-out_features // TILES[0][1].outs)
    return max(min(wanted, column_tiles // 2, MAX_SPLITS), 1)


def int8_matmul(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    weight: torch.Tensor,
    weight_scales: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """(x · x_scales) (weight · weight_scales)ᵀ + bias [out] -> [T, out] in dtype, for x int8
    [T, in] and weight int8 [out, in], both contiguous, with a float32 scale per row. Sums are
    exact, so that a row's result depends on nothing else."""
    rows, columns = x.shape
    outs = len(weight)
    out = torch.empty(rows, outs, dtype=dtype, device=x.device)
    if rows == 0:
        return out
    tiles = choose_tiles(rows, torch.int8)
    splits = choose_splits(rows, outs, triton.cdiv(columns, INT8_COLUMNS))
    parts = _parts(out, splits, torch.int32)
    _int8_kernel[(triton.cdiv(outs, tiles.outs), triton.cdiv(rows, tiles.rows), splits)](
        x,
        weight,
        x_scales,
        weight_scales,
        bias,
        parts,
        rows,
        COLUMNS=columns,
        ALL_OUTS=outs,
        ROWS=tiles.rows,
        OUTS=tiles.outs,
        TILE=INT8_COLUMNS,
        SPLITS=splits,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    if splits > 1:
        _combine(parts, x_scales, weight_scales, bias, out)
    return out


def code_matmul(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
    group: int,
    width: int,
) -> torch.Tensor:
    """x ((code − zero) · scale)ᵀ + bias [out] -> [T, out] in the dtype of x, for x [T, in].

    A group's (code − zero) are exact in any dtype: they are multiplied with x, and their sum, in
    float32, by the scale.

        codes   contiguous, with a row per output: int8 or the bits of float8_e4m3fn as uint8, one
                per input; or int4 as uint8 [out, tiles, width], see `pack_int4`
        scales  [groups, out] of any float dtype
        zeros   int16 [groups, out]; None for 0, or 8 for int4
        group   columns that share a scale
        width   bytes of a row in a tile, a power of two from 16 on that divides group, unless there
                is one group
    """
    rows, columns = x.shape
    outs, int4 = len(codes), codes.dim() == 3
    out = torch.empty(rows, outs, dtype=x.dtype, device=x.device)
    if rows == 0:
        return out
    x = x.contiguous()
    tiles = choose_tiles(rows, x.dtype)
    splits = choose_splits(rows, outs, triton.cdiv(columns, 2 * width if int4 else width))
    parts = _parts(out, splits, torch.float32)
    _code_kernel[(triton.cdiv(outs, tiles.outs), triton.cdiv(rows, tiles.rows), splits)](
        x,
        codes,
        scales,
        zeros,
        bias,
        parts,
        rows,
        COLUMNS=columns,
        ALL_OUTS=outs,
        GROUP=group,
        GROUPS=len(scales),
        INT4=int4,
        ROWS=tiles.rows,
        OUTS=tiles.outs,
        WIDTH=width,
        SPLITS=splits,
        DOT=dot_dtype(x.dtype),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    if splits > 1:
        _combine(parts, None, None, bias, out)
    return out


def pack_int4(codes: torch.Tensor, width: int) -> torch.Tensor:
    """Codes 0 to 15, uint8 [out, in] -> uint8 [out, tiles, width]: byte j of a tile of 2 · width
    columns has column j in its low half and column width + j in the other, so that both halves are
    multiplied with neighbours in x. Padded with zeros, which meet no x."""
    columns = codes.shape[1]
    padding = -columns % (2 * width)
    tiles = F.pad(codes, (0, padding)).unflatten(1, (-1, 2, width))
    packed: torch.Tensor = tiles[:, :, 0] | tiles[:, :, 1] << 4
    return packed


def unpack_int4(packed: torch.Tensor, columns: int) -> torch.Tensor:
    """`pack_int4` undone: uint8 [out, columns]."""
    return torch.stack((packed & 15, packed >> 4), dim=2).flatten(1)[:, :columns]


def _parts(out: torch.Tensor, splits: int, dtype: torch.dtype) -> torch.Tensor:
    """Memory for the first kernel's results: `out` itself, or the parts' sums."""
    if splits == 1:
        return out
    return torch.empty((splits, *out.shape), dtype=dtype, device=out.device)


def _combine(
    parts: torch.Tensor,
    x_scales: torch.Tensor | None,
    weight_scales: torch.Tensor | None,
    bias: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    splits, rows, outs = parts.shape
    _combine_kernel[(triton.cdiv(outs, COMBINED), rows)](
        parts,
        x_scales,
        weight_scales,
        bias,
        out,
        ALL_OUTS=outs,
        OUTS=COMBINED,
        SPLITS=splits,
        num_warps=4,
    )


@triton.jit
def _store(
    sums: tl.tensor,
    x_scales: tl.tensor,
    weight_scales: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    m: tl.tensor,
    n: tl.tensor,
    rows: tl.tensor,
    ALL_OUTS: tl.constexpr,
) -> None:
    """Scales sums [len(n), len(m)] if there are scales, adds the bias, and stores them at
    out[m, n]."""
    real_m, real_n = m < rows, n < ALL_OUTS
    result = sums.to(tl.float32)
    if x_scales is not None:
        by_row = tl.load(x_scales + m, mask=real_m, other=0)[None, :]
        result = result * by_row * tl.load(weight_scales + n, mask=real_n, other=0)[:, None]
    if bias is not None:
        result += tl.load(bias + n, mask=real_n, other=0).to(tl.float32)[:, None]
    address = out + m.to(tl.int64)[None, :] * ALL_OUTS + n[:, None]
    tl.store(address, result.to(out.dtype.element_ty), mask=real_n[:, None] & real_m[None, :])


@triton.jit
def _store_part(
    sums: tl.tensor,
    parts: tl.tensor,
    part: tl.tensor,
    m: tl.tensor,
    n: tl.tensor,
    rows: tl.tensor,
    ALL_OUTS: tl.constexpr,
) -> None:
    row = part.to(tl.int64) * rows + m
    mask = (n < ALL_OUTS)[:, None] & (m < rows)[None, :]
    tl.store(parts + row[None, :] * ALL_OUTS + n[:, None], sums, mask=mask)


@kernel(do_not_specialize=["rows"])
def _int8_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    x_scales: tl.tensor,
    weight_scales: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    COLUMNS: tl.constexpr,
    ALL_OUTS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
) -> None:
    """Grid (tiles of outputs, tiles of rows, splits)."""
    n = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    m = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    part = tl.program_id(2)
    tiles: tl.constexpr = (COLUMNS + TILE - 1) // TILE
    # Rows beyond the last are computed from the last and not stored.
    weights = weight + tl.minimum(n, ALL_OUTS - 1).to(tl.int64)[:, None] * COLUMNS
    numbers = x + tl.minimum(m, rows - 1).to(tl.int64)[None, :] * COLUMNS
    sums = tl.zeros([OUTS, ROWS], tl.int32)
    for tile in range(tiles * part // SPLITS, tiles * (part + 1) // SPLITS):
        k = tile * TILE + tl.arange(0, TILE)
        if COLUMNS % TILE == 0:
            w = tl.load(weights + k[None, :])
            numbers_t = tl.load(numbers + k[:, None])
        else:
            w = tl.load(weights + k[None, :], mask=(k < COLUMNS)[None, :], other=0)
            numbers_t = tl.load(numbers + k[:, None], mask=(k < COLUMNS)[:, None], other=0)
        sums = tl.dot(w, numbers_t, sums, out_dtype=tl.int32)
    if SPLITS == 1:
        _store(sums, x_scales, weight_scales, bias, out, m, n, rows, ALL_OUTS)
    else:
        _store_part(sums, out, part, m, n, rows, ALL_OUTS)


@triton.jit
def _numbers(codes: tl.tensor, zero: tl.tensor, INT4: tl.constexpr, DOT: tl.constexpr) -> tl.tensor:
    """Codes [OUTS, WIDTH] minus zeros [OUTS, 1] if given, in DOT."""
    if codes.dtype == tl.uint8 and not INT4:
        return from_e4m3(codes, DOT)
    if INT4:
        # Bits below those of a power of two, with which the number is the power plus the code.
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


@kernel(do_not_specialize=["rows"])
def _code_kernel(
    x: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
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
    DOT: tl.constexpr,
) -> None:
    """Grid (tiles of outputs, tiles of rows, splits)."""
    tile_columns: tl.constexpr = 2 * WIDTH if INT4 else WIDTH
    tiles: tl.constexpr = (COLUMNS + tile_columns - 1) // tile_columns
    row_bytes: tl.constexpr = tiles * WIDTH if INT4 else COLUMNS
    one_group: tl.constexpr = GROUPS == 1 or GROUP % tile_columns == 0  # in any tile
    padded: tl.constexpr = COLUMNS % tile_columns != 0

    n = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    m = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    part = tl.program_id(2)
    # Rows beyond the last are computed from the last and not stored.
    real_n = tl.minimum(n, ALL_OUTS - 1)
    rows_of_codes = codes + real_n.to(tl.int64)[:, None] * row_bytes
    rows_of_x = x + tl.minimum(m, rows - 1).to(tl.int64)[None, :] * COLUMNS
    column = tl.arange(0, WIDTH)
    sums = tl.zeros([OUTS, ROWS], tl.float32)
    for tile in range(tiles * part // SPLITS, tiles * (part + 1) // SPLITS):
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
    if codes.dtype.element_ty == tl.uint8 and not INT4:
        sums = sums * 256.0  # see `from_e4m3`
    if SPLITS == 1:
        _store(sums, None, None, bias, out, m, n, rows, ALL_OUTS)
    else:
        _store_part(sums, out, part, m, n, rows, ALL_OUTS)


@kernel()
def _combine_kernel(
    parts: tl.tensor,
    x_scales: tl.tensor,
    weight_scales: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    ALL_OUTS: tl.constexpr,
    OUTS: tl.constexpr,
    SPLITS: tl.constexpr,
) -> None:
    """Adds up the parts of some outputs of a row; grid (tiles of outputs, rows)."""
    n = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    m = tl.program_id(1)
    rows = tl.num_programs(1)
    address = parts + m.to(tl.int64) * ALL_OUTS + n
    sums = tl.load(address, mask=n < ALL_OUTS, other=0)
    for part in tl.static_range(1, SPLITS):
        step = part * rows.to(tl.int64) * ALL_OUTS
        sums += tl.load(address + step, mask=n < ALL_OUTS, other=0)
    _store(
        sums[:, None], x_scales, weight_scales, bias, out, m + tl.arange(0, 1), n, rows, ALL_OUTS
    )
