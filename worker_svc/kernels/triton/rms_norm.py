"""Root mean square normalization, alone and after adding to the residual stream.

Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019).
"""

from __future__ import annotations

import torch
import triton.language as tl

from worker_svc.kernels.triton.launch import kernel, next_power_of_2


def rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """See `kernels.ops.Ops`. The sum is rounded to residual's dtype, but normalized unrounded. Rows
    of x and of residual may be strided."""
    out = torch.empty_like(x)
    tokens, size = x.shape
    block = next_power_of_2(size)
    _rms_norm_kernel[(tokens,)](
        x,
        x.stride(0),
        residual,
        0 if residual is None else residual.stride(0),
        weight,
        eps,
        out,
        SIZE=size,
        BLOCK=block,
        # 8 elements per thread are one 16-byte load of half precision. In rows of more than 2,048
        # elements a thread makes several loads: with more warps, the sum over the row would take
        # longer than the loads.
        num_warps=min(max(block // (32 * 8), 1), 8),
    )
    return out


@kernel()
def _rms_norm_kernel(
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
    values = tl.load(x + row * x_stride + columns, mask=mask, other=0).to(tl.float32)
    if residual is not None:
        residuals = residual + row * residual_stride + columns
        values = tl.load(residuals, mask=mask, other=0).to(tl.float32) + values
        tl.store(residuals, values, mask=mask)
    if weight is not None:
        scale = tl.rsqrt(tl.sum(values * values, axis=0) / SIZE + eps)
        values = values * scale * tl.load(weight + columns, mask=mask, other=0).to(tl.float32)
    tl.store(out + row * SIZE + columns, values, mask=mask)


def sum_rows(x: torch.Tensor) -> torch.Tensor:
    """See `kernels.ops.Ops`. Columns of x are contiguous."""
    tokens, size = x.shape
    out = torch.empty(tokens, dtype=x.dtype, device=x.device)
    block = next_power_of_2(size)
    num_warps = min(max(block // 256, 1), 8)
    _sum_rows_kernel[(tokens,)](x, x.stride(0), out, SIZE=size, BLOCK=block, num_warps=num_warps)
    return out


@kernel()
def _sum_rows_kernel(
    x: tl.tensor,
    x_stride: tl.tensor,
    out: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    values = tl.load(x + row * x_stride + columns, mask=columns < SIZE, other=0)
    tl.store(out + row, tl.sum(values, axis=0))


# In torch, because OLMo alone has these norms.
def sum_squares(x: torch.Tensor, sizes: tuple[int, int]) -> torch.Tensor:
    parts = x[:, : sum(sizes)].float().square().split(sizes, dim=1)
    return torch.stack([sum_rows(part) for part in parts], dim=1)


def scale_parts(
    x: torch.Tensor,
    squares: torch.Tensor,
    weight: torch.Tensor,
    sizes: tuple[int, int],
    total_sizes: tuple[int, int],
    eps: float,
) -> torch.Tensor:
    firsts = (0, sizes[0])
    for number, (first, size, total) in enumerate(zip(firsts, sizes, total_sizes, strict=True)):
        scale = (squares[:, number : number + 1] / total + eps).rsqrt()
        part = x[:, first : first + size]
        part.copy_(part.float() * scale * weight[first : first + size].float())
    return x
