"""Products with quantized weights as their definition has them, in place of a device's kernels."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from worker_svc.kernels.cpu import ops as cpu_ops
from worker_svc.kernels.cpu.program import tracing
from worker_svc.kernels.cpu.weights import SEGMENT
from worker_svc.kernels.ops import Exchange, PackedWeight, PlainWeight
from worker_svc.weights.quantization.formats import QuantizedWeight, quantize_rows


def rounded(
    x: torch.Tensor, exchange: Exchange | None = None, segment: int = SEGMENT
) -> torch.Tensor:
    """x [T, in], as a CPU multiplies it: in 8 bits, each `segment` of all ranks' inputs with a
    scale of its own. The result is float64."""
    rows, columns = x.shape
    first = exchange.first if exchange else 0
    whole = torch.zeros(rows, -(-(exchange.columns if exchange else columns) // segment) * segment)
    whole[:, first : first + columns] = x
    segments = whole.view(-1, segment)
    maxima = segments.abs().amax(dim=1)
    if exchange:
        maxima = exchange.maximum(maxima)
    codes, scales = quantize_rows(segments, maxima)
    values = (codes.double() * scales.double()[:, None]).view(rows, -1)
    return values[:, first : first + columns]


class ExactWeight:
    """Keeps codes, scales and zeros as they are."""

    def __init__(self, weight: QuantizedWeight) -> None:
        self.weight = weight

    def matmul(
        self, x: torch.Tensor, bias: torch.Tensor | None, exchange: Exchange | None = None
    ) -> torch.Tensor:
        if trace := tracing():
            multiply = partial(self.matmul, bias=bias, exchange=exchange)
            return trace.call(multiply, x, self.weight.shape[0])
        left = x.double()
        if self.weight.format != "fp8":
            left = rounded(x, exchange)
        product = left @ self.weight.dequantized().double().T
        return (product if bias is None else product + bias).to(x.dtype)

    def state(self) -> dict[str, torch.Tensor]:
        weight = self.weight
        zeros = {} if weight.zeros is None else {"zeros": weight.zeros}
        return {weight.format: weight.codes, "scales": weight.scales} | zeros


class ExactFloats(PlainWeight):
    def matmul(
        self, x: torch.Tensor, bias: torch.Tensor | None, exchange: Exchange | None = None
    ) -> torch.Tensor:
        if trace := tracing():
            return trace.call(partial(self.matmul, bias=bias), x, len(self.weight))
        return super().matmul(x.to(self.weight.dtype), bias).float()


def embed(
    input_ids: torch.Tensor,
    last_tokens: torch.Tensor,
    weight: PackedWeight,
    start: int,
    count: int,
) -> torch.Tensor:
    if isinstance(weight, ExactWeight):
        weight = PlainWeight(weight.weight.dequantized())
        _tables.append(weight)  # the trace has its address
    return _embed(input_ids, last_tokens, weight, start, count)


_embed, _tables = cpu_ops.embed, list[PlainWeight]()


def pack(weight: torch.Tensor | QuantizedWeight, dtype: torch.dtype) -> PackedWeight:
    return ExactWeight(weight) if isinstance(weight, QuantizedWeight) else ExactFloats(weight)


def unpack(state: dict[str, torch.Tensor]) -> PackedWeight:
    (format,) = set(state) - {"scales", "zeros"}
    made: Any = QuantizedWeight
    return ExactWeight(made(format, state[format], state["scales"], state.get("zeros")))


def use_exact_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has a CPU multiply with `ExactWeight`."""
    monkeypatch.setattr(cpu_ops, "pack", pack)
    monkeypatch.setattr(cpu_ops, "unpack", unpack)
    monkeypatch.setattr(cpu_ops, "embed", embed)
    monkeypatch.setattr(cpu_ops, "layout", "exact")
