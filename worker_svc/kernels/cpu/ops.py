"""Implements `kernels.ops.Ops` on a CPU."""

from __future__ import annotations

from collections.abc import Iterable
from ctypes import addressof

import torch

from worker_svc.kernels import cpu_features
from worker_svc.kernels.cpu.experts import mix_experts
from worker_svc.kernels.cpu.program import current_trace, tracing
from worker_svc.kernels.cpu.quantize import quantize
from worker_svc.kernels.cpu.sampling.filtering import pick_bins, weigh_by_key
from worker_svc.kernels.cpu.sampling.selection import chunk_statistics, select_tokens
from worker_svc.kernels.cpu.sampling.tokens import apply_masks, penalize, store_tokens
from worker_svc.kernels.cpu.structs import Phase, Vector, vector
from worker_svc.kernels.cpu.weights import PanelWeight, pack_floats, pack_quantized, stack
from worker_svc.kernels.ops import Activation, Exchange, PackedWeight, PlainWeight
from worker_svc.kv_cache import NewTensor
from worker_svc.weights.quantization.formats import Format, QuantizedWeight

# Instruction sets on which a layout or the order of sums depends.
_SETS = ("avx2", "avx512f", "avx512vnni", "avx512bf16", "amx-bf16")
layout = "-".join(["panels-2", *filter(cpu_features.has, _SETS)])


def embed(
    input_ids: torch.Tensor,
    last_tokens: torch.Tensor,
    weight: PackedWeight,
    start: int,
    count: int,
    scale: float = 1.0,
) -> torch.Tensor:
    table, codes = Vector(), None
    if isinstance(weight, PlainWeight):
        table, size = vector(weight.weight), weight.weight.shape[1]
    else:
        assert isinstance(weight, PanelWeight)  # no other weight of a device is looked up
        codes, size = addressof(weight.struct(None, weight.segment)), weight.in_features
    return current_trace().embed(table, codes, size, start, count, scale)


def new_rows(input_ids: torch.Tensor, columns: int, dtype: torch.dtype) -> torch.Tensor:
    return current_trace().new_rows(columns)[1]


def rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None, eps: float
) -> torch.Tensor:
    return current_trace().norm(x, residual, weight, eps)


def sum_rows(x: torch.Tensor) -> torch.Tensor:
    return x.sum(1)


def sum_squares(x: torch.Tensor, sizes: tuple[int, int]) -> torch.Tensor:
    return current_trace().norm_parts(Phase.SUM_SQUARES, x, None, (*sizes, 0, 0))


def scale_parts(
    x: torch.Tensor,
    squares: torch.Tensor,
    weight: torch.Tensor,
    sizes: tuple[int, int],
    total_sizes: tuple[int, int],
    eps: float,
) -> torch.Tensor:
    all_sizes = *sizes, *total_sizes
    current_trace().norm_parts(Phase.SCALE_PARTS, x, squares, all_sizes, weight, eps)
    return x


def activate_and_multiply(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    return current_trace().activate(gate_up, activation)


def last_rows(x: torch.Tensor, query_starts: torch.Tensor) -> torch.Tensor:
    return current_trace().last_rows(x)


def table_format(format: Format) -> Format:
    return "int6" if format == "int4" else "int8"


def pack(weight: torch.Tensor | QuantizedWeight, dtype: torch.dtype) -> PackedWeight:
    if isinstance(weight, torch.Tensor) and weight.dtype == torch.bfloat16:
        amx = cpu_features.has("amx-bf16")  # only oneDNN uses it
        if amx and torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return OneDnnWeight(weight)
    return pack_panels(weight, dtype)


def pack_panels(weight: torch.Tensor | QuantizedWeight, dtype: torch.dtype) -> PanelWeight:
    """Packs `weight` for kernels in which a row's bits do not depend on the other rows."""
    if isinstance(weight, QuantizedWeight):
        return pack_quantized(weight)
    return pack_floats(weight if weight.dtype == torch.bfloat16 else weight.float())


def pack_experts(
    weights: Iterable[torch.Tensor | QuantizedWeight],
    count: int,
    dtype: torch.dtype,
    new: NewTensor,
) -> PackedWeight:
    return stack((pack_panels(each, dtype) for each in weights), count, new)


def unpack(state: dict[str, torch.Tensor]) -> PackedWeight:
    return PanelWeight(state) if "codes" in state else PlainWeight(state["weight"])


class OneDnnWeight:
    """W in oneDNN's blocked layout, into which `F.linear` would reorder it in every call."""

    # oneDNN chooses the layout that is best for this number of rows. With the layout for 32 rows it
    # also reads W fastest for one row.
    _BEST_FOR_ROWS = 32

    def __init__(self, weight: torch.Tensor) -> None:
        reorder = torch.ops.mkldnn._reorder_linear_weight
        self._weight: torch.Tensor = reorder(weight, self._BEST_FOR_ROWS)
        self._dtype = weight.dtype
        self._out_features = weight.shape[0]

    def matmul(
        self, x: torch.Tensor, bias: torch.Tensor | None, exchange: Exchange | None = None
    ) -> torch.Tensor:
        if trace := tracing():
            return trace.call(lambda rows: self.matmul(rows, bias), x, self._out_features)
        linear = torch.ops.mkldnn._linear_pointwise
        bias = None if bias is None else bias.to(self._dtype)
        y: torch.Tensor = linear(x.to(self._dtype), self._weight, bias, "none", [], "")
        return y.float()

    def state(self) -> None:
        return None
