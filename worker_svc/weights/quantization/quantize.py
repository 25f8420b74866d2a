"""Quantizes weights that a checkpoint holds as floating-point numbers."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from worker_svc.errors import ModelError
from worker_svc.weights.quantization.formats import Format, QuantizedWeight
from worker_svc.weights.quantization.pieces import pack_int4

GROUP_SIZES = 128, 64, 32
# A group's largest magnitude divided by each of these is a candidate for its scale. For normally
# distributed weights in groups of 128, these candidates leave an error of 9.73 % of the norm. 20
# candidates leave 9.70 %, the magnitude over 8 alone leaves 10.2 %, and over 7 it leaves 11.8 %.
DIVISORS = 7.0, 7.5, 8.0, 8.5, 9.0, 10.0
# The magnitude of the largest code, which is that of a row's or group's largest weight.
TOPS = {"int8": 127.0, "int6": 31.0, "fp8": 448.0}
# The number of elements at a time, by device: so few that their intermediate results stay in the
# CPU's cache, or so many that a GPU computes for longer than the CPU launches.
_PIECES = {"cpu": 1 << 18, "cuda": 1 << 22}


def group_size(in_features: int) -> int:
    """The number of inputs that share a scale in int4 and int6, the largest of `GROUP_SIZES` that
    is possible.

    Raises:
        ModelError: no size divides `in_features`.
    """
    for size in GROUP_SIZES:
        if in_features % size == 0:
            return size
    raise ModelError(f"quantization: int4 needs a multiple of 32 inputs, a layer has {in_features}")


def empty(
    out: int, columns: int, format: Format, device: torch.device | None = None
) -> QuantizedWeight:
    """Makes W [out, in] as `quantize` returns it, but does not set its numbers.

    Raises:
        ModelError: as `group_size`.
    """
    groups = columns // group_size(columns) if format in ("int4", "int6") else 1
    dtype, width = {
        "int8": (torch.int8, columns),
        "int6": (torch.int8, columns),
        "int4": (torch.uint8, columns // 2),
        "fp8": (torch.float8_e4m3fn, columns),
    }[format]
    codes = torch.empty(out, width, dtype=dtype, device=device)
    return QuantizedWeight(format, codes, torch.empty(out, groups, device=device))


def quantize(weight: torch.Tensor, format: Format) -> QuantizedWeight:
    """W [out, in] float32 -> its codes and scales, which depend in each row only on that row.

    Raises:
        ModelError: as `group_size`.
    """
    out, columns = weight.shape
    quantized = empty(out, columns, format, weight.device)
    codes, scales = quantized.codes, quantized.scales
    groups = scales.shape[1]
    for rows in _pieces(weight):
        part = weight[rows]
        if format == "int4":
            scales[rows] = _int4_scales(part, groups)
            codes[rows] = _int4_codes(part, scales[rows])
            continue
        part = part.view(-1, columns // groups)
        factors = part.abs().amax(dim=1, keepdim=True) / TOPS[format]
        values = (part * _inverse(factors)).view(-1, columns)
        scales[rows] = factors.view(-1, groups)
        codes[rows] = (values if format == "fp8" else values.round_()).to(codes.dtype)
    return quantized


def _pieces(weight: torch.Tensor) -> Iterator[slice]:
    out, columns = weight.shape
    step = max(_PIECES[weight.device.type] // columns, 1)
    for start in range(0, out, step):
        yield slice(start, min(start + step, out))


def _inverse(scales: torch.Tensor) -> torch.Tensor:
    """1 / scales, or 0 for a scale so small that the result would overflow."""
    return torch.where(scales.abs() > torch.finfo(torch.float32).tiny, 1 / scales, 0)


def _int4_scales(weight: torch.Tensor, groups: int) -> torch.Tensor:
    """The scales [out, groups] with the smallest sum of squared errors among a few candidates.

    Each divisor gives codes, and the candidate is the scale that fits these codes best by least
    squares. A scale's sign is opposite to the sign of its group's largest magnitude. At that end
    codes reach −8, but only 7 at the other end. Q4_0 in llama.cpp does this too.
    """
    x = weight.reshape(-1, weight.shape[1] // groups)
    high, low = x.amax(dim=1), x.amin(dim=1)
    largest = torch.where(high > -low, -high, -low)
    best, gain = torch.zeros_like(largest), torch.zeros_like(largest)
    for divisor in DIVISORS:
        codes = (x * _inverse(largest / divisor)[:, None]).round_().clamp_(-8, 7)
        # With scale s the error is Σx² − 2s·Σxq + s²·Σq²; the best s leaves Σx² − (Σxq)² / Σq².
        products, squares = (x * codes).sum(dim=1), codes.square_().sum(dim=1)
        scale = products * _inverse(squares)
        better = scale * products > gain
        best = torch.where(better, scale, best)
        gain = torch.where(better, scale * products, gain)
    return best.view(-1, groups)


def _int4_codes(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    x = weight.view(len(weight), scales.shape[1], -1)
    codes = (x * _inverse(scales)[:, :, None]).round_().clamp_(-8, 7).add_(8)
    return pack_int4(codes.to(torch.uint8).flatten(1))
