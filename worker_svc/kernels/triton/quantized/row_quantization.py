"""Quantizes the rows of activations, for products with 8-bit weights."""

from __future__ import annotations

import torch
import triton.language as tl

from worker_svc.kernels.triton.codes import MAX_E4M3, round_to_even, to_e4m3
from worker_svc.kernels.triton.launch import kernel, next_power_of_2


def quantize(
    x: torch.Tensor,
    dtype: torch.dtype,
    *,
    group: int | None = None,
    maxima: torch.Tensor | None = None,
    multiple: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, size], whose rows may be strided -> codes [T, size] in dtype, int8 or float8_e4m3fn,
    and scales float32 [T, groups], column-major. x is about code · scale, and the largest magnitude
    of a group has the largest code. int8 codes equal those of `formats.quantize_rows`.

    Args:
        group: columns that share a scale; None for all.
        maxima: float32 [T], magnitudes to use instead of a row's largest, if there is one group.
        multiple: T in the results is a multiple of this; the contents of added rows are undefined.
    """
    tokens, size = x.shape
    group = group or size
    groups = -(-size // group)
    padded = -(-tokens // multiple) * multiple
    codes = torch.empty(padded, size, dtype=dtype, device=x.device)
    scales = torch.empty(groups, padded, dtype=torch.float32, device=x.device)
    width = next_power_of_2(group)
    block = width * next_power_of_2(groups)
    _quantize_kernel[(tokens,)](
        x,
        x.stride(0),
        maxima,
        codes if dtype == torch.int8 else codes.view(torch.uint8),
        scales,
        padded,
        SIZE=size,
        GROUP=group,
        WIDTH=width,
        GROUPS=block // width,
        LARGEST=127.0 if dtype == torch.int8 else MAX_E4M3,
        num_warps=min(max(block // (32 * 16), 1), 16),
        enable_fp_fusion=False,  # see `round_to_even`
    )
    return codes, scales.T


@kernel(do_not_specialize=["padded"])
def _quantize_kernel(
    x: tl.tensor,
    x_stride: tl.tensor,
    maxima: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    padded: tl.tensor,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    LARGEST: tl.constexpr,
) -> None:
    """Quantizes one row of x; each row of the program's tile is a group."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)
    column = tl.arange(0, WIDTH)[None, :]
    offsets = group[:, None] * GROUP + column
    mask = (column < GROUP) & (offsets < SIZE)
    values = tl.load(x + row * x_stride + offsets, mask=mask, other=0).to(tl.float32)
    if maxima is None:
        top = tl.max(tl.abs(values), axis=1)
    else:
        top = tl.zeros([GROUPS], tl.float32) + tl.load(maxima + row)
    largest = tl.full([GROUPS], LARGEST, tl.float32)
    # Torch, too, divides a number by a tensor by multiplying it by the reciprocal.
    factor = tl.where(top > 0, LARGEST * tl.div_rn(1.0, tl.where(top > 0, top, 1)), 0)
    scaled = values * factor[:, None]
    if codes.dtype.element_ty == tl.int8:
        code = round_to_even(scaled).to(tl.int8)
    else:
        code = to_e4m3(scaled)
    tl.store(codes + row * SIZE + offsets, code, mask=mask)
    address = scales + group.to(tl.int64) * padded + row
    tl.store(address, tl.div_rn(top, largest), mask=group * GROUP < SIZE)
