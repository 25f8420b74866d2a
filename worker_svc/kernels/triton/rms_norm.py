"""Root mean square normalization, alone and after adding to the residual stream.

Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from worker_svc.kernels.triton.launch import kernel, next_power_of_2


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [T, size] / rms(x) · weight [size] -> [T, size]; rows of x may be strided."""
    out = torch.empty_like(x)
    tokens, size = x.shape
    if tokens:
        block = next_power_of_2(size)
        _rms_norm_kernel[(tokens,)](
            x, x.stride(0), weight, eps, out, SIZE=size, BLOCK=block, num_warps=_num_warps(block)
        )
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """residual [T, size] += x [T, size], rounded to residual's dtype -> the norm of the unrounded
    sum, times weight [size]. Rows of x and of residual may be strided."""
    out = torch.empty_like(x)
    tokens, size = x.shape
    if tokens:
        block = next_power_of_2(size)
        _add_rms_norm_kernel[(tokens,)](
            x,
            x.stride(0),
            residual,
            residual.stride(0),
            weight,
            eps,
            out,
            SIZE=size,
            BLOCK=block,
            num_warps=_num_warps(block),
        )
    return out


def _num_warps(block: int) -> int:
    """Warps per row. 8 elements per thread are one 16-byte load of half precision. In rows of more
    than 2,048 elements a thread makes several loads: with more warps, the sum over the row would
    take longer than the loads."""
    return min(max(block // (32 * 8), 1), 8)


@kernel()
def _rms_norm_kernel(
    x: tl.tensor,
    x_stride: tl.tensor,
    weight: tl.tensor,
    eps: tl.tensor,
    out: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < SIZE
    values = tl.load(x + row * x_stride + columns, mask=mask, other=0).to(tl.float32)
    normalized = _normalized(values, weight, columns, mask, eps, SIZE)
    tl.store(out + row * SIZE + columns, normalized, mask=mask)


@kernel()
def _add_rms_norm_kernel(
    x: tl.tensor,
    x_stride: tl.tensor,
    residual: tl.tensor,
    residual_stride: tl.tensor,
    weight: tl.tensor,
    eps: tl.tensor,
    out: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < SIZE
    residuals = residual + row * residual_stride + columns
    added = tl.load(x + row * x_stride + columns, mask=mask, other=0).to(tl.float32)
    total = tl.load(residuals, mask=mask, other=0).to(tl.float32) + added
    tl.store(residuals, total, mask=mask)
    normalized = _normalized(total, weight, columns, mask, eps, SIZE)
    tl.store(out + row * SIZE + columns, normalized, mask=mask)


@triton.jit
def _normalized(
    values: tl.tensor,
    weight: tl.tensor,
    columns: tl.tensor,
    mask: tl.tensor,
    eps: tl.tensor,
    SIZE: tl.constexpr,
) -> tl.tensor:
    """values [BLOCK] float32, 0 past SIZE -> the norm of values, times weight."""
    scale = tl.rsqrt(tl.sum(values * values, axis=0) / SIZE + eps)
    return values * scale * tl.load(weight + columns, mask=mask, other=0).to(tl.float32)
