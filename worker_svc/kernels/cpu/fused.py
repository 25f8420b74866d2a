"""The small operations between the matrix products, each in one pass over its data.

In torch each is a handful of operations, and decoding one token is a thousand of them: together
they took longer than reading the weights. All compute in float32 and round once.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numba import njit, prange
from numpy.typing import NDArray

from worker_svc.kernels.cpu.simd import FASTMATH, bits, exp, narrow, widen

# With fewer tokens than this, waking another thread costs more than it saves.
PARALLEL_TOKENS = 8


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [T, size] / rms(x) · weight [size]"""
    x = x.contiguous()
    out = torch.empty_like(x)
    _rms_norm(bits(x), bits(weight), eps, bits(out))
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """residual [T, size] += x [T, size], rounded to its dtype; -> the norm of the sum before it was
    rounded, times weight [size]"""
    out = torch.empty_like(x)
    _add_rms_norm(bits(x), bits(residual), bits(weight), eps, bits(out))
    return out


def norm_and_rotate(
    qkv: torch.Tensor,
    first_head: int,
    num_heads: int,
    weight: torch.Tensor,
    eps: float,
    cos_sin: torch.Tensor,
    positions: NDArray[np.int64],
) -> torch.Tensor:
    """Heads [first_head, first_head + num_heads) of qkv [T, heads, head_dim], normalized with
    weight [head_dim], then rotated by cos_sin [max_model_len, 2, head_dim / 2] at positions [T]
    -> [T, num_heads, head_dim]"""
    out = qkv.new_empty(len(qkv), num_heads, qkv.shape[2])
    _norm_and_rotate(bits(qkv), first_head, bits(weight), eps, bits(cos_sin), positions, bits(out))
    return out


def silu_and_multiply(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [T, 2 · size], gate before up -> silu(gate) · up [T, size]"""
    out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
    _silu_and_multiply(bits(gate_up), bits(out))
    return out


@njit(inline="always")
def _rms_norm_row(
    x: NDArray[Any], weight: NDArray[Any], eps: float, out: NDArray[Any], row: int
) -> None:
    size = x.shape[1]
    squares = np.float32(0)
    for i in range(size):
        value = widen(x[row, i])
        squares += value * value
    scale = np.float32(1 / math.sqrt(squares / size + eps))
    for i in range(size):
        out[row, i] = narrow(widen(x[row, i]) * scale * widen(weight[i]), out[row, i])


@njit(parallel=True, cache=True, nogil=True, error_model="numpy", fastmath=FASTMATH)
def _rms_norm(x: NDArray[Any], weight: NDArray[Any], eps: float, out: NDArray[Any]) -> None:
    if len(x) < PARALLEL_TOKENS:
        for row in range(len(x)):
            _rms_norm_row(x, weight, eps, out, row)
    else:
        for row in prange(len(x)):
            _rms_norm_row(x, weight, eps, out, row)


@njit(inline="always")
def _add_rms_norm_row(
    x: NDArray[Any],
    residual: NDArray[Any],
    weight: NDArray[Any],
    eps: float,
    out: NDArray[Any],
    row: int,
) -> None:
    size = x.shape[1]
    squares = np.float32(0)
    for i in range(size):
        value = widen(x[row, i]) + widen(residual[row, i])
        squares += value * value
    scale = np.float32(1 / math.sqrt(squares / size + eps))
    for i in range(size):
        value = widen(x[row, i]) + widen(residual[row, i])
        residual[row, i] = narrow(value, residual[row, i])
        out[row, i] = narrow(value * scale * widen(weight[i]), out[row, i])


@njit(parallel=True, cache=True, nogil=True, error_model="numpy", fastmath=FASTMATH)
def _add_rms_norm(
    x: NDArray[Any], residual: NDArray[Any], weight: NDArray[Any], eps: float, out: NDArray[Any]
) -> None:
    if len(x) < PARALLEL_TOKENS:
        for row in range(len(x)):
            _add_rms_norm_row(x, residual, weight, eps, out, row)
    else:
        for row in prange(len(x)):
            _add_rms_norm_row(x, residual, weight, eps, out, row)


@njit(inline="always")
def _norm_and_rotate_row(
    qkv: NDArray[Any],
    first_head: int,
    weight: NDArray[Any],
    eps: float,
    cos_sin: NDArray[np.float32],
    positions: NDArray[np.int64],
    out: NDArray[Any],
    row: int,
) -> None:
    head_dim = qkv.shape[2]
    half = head_dim // 2
    position = positions[row]
    for head in range(out.shape[1]):
        source = first_head + head
        squares = np.float32(0)
        for i in range(head_dim):
            value = widen(qkv[row, source, i])
            squares += value * value
        scale = np.float32(1 / math.sqrt(squares / head_dim + eps))
        for i in range(half):
            cos, sin = cos_sin[position, 0, i], cos_sin[position, 1, i]
            first = widen(qkv[row, source, i]) * scale * widen(weight[i])
            second = widen(qkv[row, source, half + i]) * scale * widen(weight[half + i])
            out[row, head, i] = narrow(first * cos - second * sin, out[row, head, i])
            out[row, head, half + i] = narrow(second * cos + first * sin, out[row, head, i])


@njit(parallel=True, cache=True, nogil=True, error_model="numpy", fastmath=FASTMATH)
def _norm_and_rotate(
    qkv: NDArray[Any],
    first_head: int,
    weight: NDArray[Any],
    eps: float,
    cos_sin: NDArray[np.float32],
    positions: NDArray[np.int64],
    out: NDArray[Any],
) -> None:
    if len(qkv) < PARALLEL_TOKENS:
        for row in range(len(qkv)):
            _norm_and_rotate_row(qkv, first_head, weight, eps, cos_sin, positions, out, row)
    else:
        for row in prange(len(qkv)):
            _norm_and_rotate_row(qkv, first_head, weight, eps, cos_sin, positions, out, row)


@njit(inline="always")
def _silu_and_multiply_row(gate_up: NDArray[Any], out: NDArray[Any], row: int) -> None:
    size = out.shape[1]
    for i in range(size):
        gate = widen(gate_up[row, i])
        value = gate / (np.float32(1) + exp(-gate))
        out[row, i] = narrow(value * widen(gate_up[row, size + i]), out[row, i])


@njit(parallel=True, cache=True, nogil=True, error_model="numpy", fastmath=FASTMATH)
def _silu_and_multiply(gate_up: NDArray[Any], out: NDArray[Any]) -> None:
    if len(out) < PARALLEL_TOKENS:
        for row in range(len(out)):
            _silu_and_multiply_row(gate_up, out, row)
    else:
        for row in prange(len(out)):
            _silu_and_multiply_row(gate_up, out, row)
