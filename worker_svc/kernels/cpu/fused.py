"""The small operations between the matrix products, each in one pass over its data and in float32.

In torch each of them is a handful of operations, so decoding one token took a thousand operations.
Together they took longer than reading the weights.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numba import njit, prange
from numpy.typing import NDArray

from worker_svc.kernels.cpu.compiled import kernel
from worker_svc.kernels.cpu.simd import FASTMATH, bits, exp, widen

Floats = NDArray[np.float32]

# With fewer tokens than this, waking another thread costs more than it saves.
PARALLEL_TOKENS = 8


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [T, size] / rms(x) · weight [size]"""
    out = torch.empty_like(x)
    _rms_norm(x.numpy(), bits(weight), eps, out.numpy())
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Adds x [T, size] to residual [T, size] in place -> `rms_norm` of the sum."""
    out = torch.empty_like(x)
    _add_rms_norm(x.numpy(), residual.numpy(), bits(weight), eps, out.numpy())
    return out


def silu_and_multiply(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [T, 2 · size], gate before up -> silu(gate) · up [T, size]"""
    out = torch.empty(gate_up.shape[0], gate_up.shape[1] // 2)
    _silu_and_multiply(gate_up.numpy(), out.numpy())
    return out


@njit(inline="always")
def _norm_row(x: Floats, weight: NDArray[Any], eps: float, out: Floats, row: int) -> None:
    size = x.shape[1]
    squares = np.float32(0)
    for i in range(size):
        squares += x[row, i] * x[row, i]
    scale = np.float32(1 / math.sqrt(squares / size + eps))
    for i in range(size):
        out[row, i] = x[row, i] * scale * widen(weight[i])


@kernel(parallel=True, nogil=True, error_model="numpy", fastmath=FASTMATH)
def _rms_norm(x: Floats, weight: NDArray[Any], eps: float, out: Floats) -> None:
    if len(x) < PARALLEL_TOKENS:
        for row in range(len(x)):
            _norm_row(x, weight, eps, out, row)
    else:
        for row in prange(len(x)):
            _norm_row(x, weight, eps, out, row)


@njit(inline="always")
def _add_row(x: Floats, residual: Floats, row: int) -> None:
    for i in range(x.shape[1]):
        residual[row, i] += x[row, i]


@kernel(parallel=True, nogil=True, error_model="numpy", fastmath=FASTMATH)
def _add_rms_norm(
    x: Floats, residual: Floats, weight: NDArray[Any], eps: float, out: Floats
) -> None:
    if len(x) < PARALLEL_TOKENS:
        for row in range(len(x)):
            _add_row(x, residual, row)
            _norm_row(residual, weight, eps, out, row)
    else:
        for row in prange(len(x)):
            _add_row(x, residual, row)
            _norm_row(residual, weight, eps, out, row)


@njit(inline="always")
def _silu_and_multiply_row(gate_up: Floats, out: Floats, row: int) -> None:
    size = out.shape[1]
    for i in range(size):
        gate = gate_up[row, i]
        out[row, i] = gate / (np.float32(1) + exp(-gate)) * gate_up[row, size + i]


@kernel(parallel=True, nogil=True, error_model="numpy", fastmath=FASTMATH)
def _silu_and_multiply(gate_up: Floats, out: Floats) -> None:
    if len(out) < PARALLEL_TOKENS:
        for row in range(len(out)):
            _silu_and_multiply_row(gate_up, out, row)
    else:
        for row in prange(len(out)):
            _silu_and_multiply_row(gate_up, out, row)
