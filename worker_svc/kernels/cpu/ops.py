"""Implements `kernels.ops.Ops` on a CPU."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from worker_svc.kernels import cpu_features
from worker_svc.kernels.cpu.fused import add_rms_norm, rms_norm, silu_and_multiply
from worker_svc.kernels.cpu.quantize import quantize
from worker_svc.kernels.cpu.sampling.filtering import count_by_key, pick_bins, weigh_by_key
from worker_svc.kernels.cpu.sampling.selection import chunk_statistics, select_tokens
from worker_svc.kernels.cpu.sampling.tokens import apply_masks, penalize, store_tokens
from worker_svc.kernels.cpu.weights import PanelWeight, pack_floats, pack_quantized
from worker_svc.kernels.ops import Exchange, PackedWeight, PlainWeight
from worker_svc.weights.quantization.formats import QuantizedWeight

__all__ = [
    "add_rms_norm",
    "apply_masks",
    "chunk_statistics",
    "count_by_key",
    "embed",
    "layout",
    "pack",
    "penalize",
    "pick_bins",
    "quantize",
    "rms_norm",
    "select_tokens",
    "silu_and_multiply",
    "store_tokens",
    "unpack",
    "weigh_by_key",
]


# Instruction sets on which a layout or the order of sums depends.
_SETS = ("avx2", "avx512f", "avx512vnni", "avx512bf16", "amx-bf16")
layout = "-".join(["panels-1", *filter(cpu_features.has, _SETS)])


def embed(
    input_ids: torch.Tensor,
    last_tokens: torch.Tensor,
    weight: PackedWeight,
    start: int,
    count: int,
) -> torch.Tensor:
    # numpy takes half of torch's time for arrays this small.
    local = input_ids.numpy() - np.int64(start)
    sampled = input_ids.numpy() < 0
    if sampled.any():
        local[sampled] = last_tokens.numpy()[-1 - input_ids.numpy()[sampled]] - start
    elsewhere = (local < 0) | (local >= count)
    if not elsewhere.any():
        return weight.rows(torch.from_numpy(local)).float()
    local[elsewhere] = 0
    rows = weight.rows(torch.from_numpy(local)).float()
    return rows.masked_fill(torch.from_numpy(elsewhere)[:, None], 0)


def pack(weight: torch.Tensor | QuantizedWeight, dtype: torch.dtype) -> PackedWeight:
    if isinstance(weight, QuantizedWeight):
        return pack_quantized(weight)
    if _has_panels(weight.dtype):
        return pack_floats(weight)
    if not has_onednn(weight.dtype):
        weight = weight.float()
    return OneDnnWeight(weight) if has_onednn(weight.dtype) else PlainWeight(weight)


def unpack(state: dict[str, torch.Tensor]) -> PackedWeight:
    return PanelWeight(state) if "codes" in state else pack(state["weight"], torch.float32)


def _has_panels(dtype: torch.dtype) -> bool:
    """Whether panels are at least as fast as oneDNN. They are slower with AMX, which only oneDNN
    uses."""
    amx = cpu_features.has("amx-bf16") and dtype == torch.bfloat16
    return cpu_features.has("avx2") and not amx


def has_onednn(dtype: torch.dtype) -> bool:
    """Whether oneDNN is available and multiplies `dtype` on this CPU."""
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return bool(torch._C._has_mkldnn)


class OneDnnWeight:
    """W in oneDNN's blocked layout, into which `F.linear` would reorder it in every call."""

    # oneDNN chooses the layout that is best for this number of rows. With the layout for 32 rows it
    # also reads W fastest for one row.
    _BEST_FOR_ROWS = 32

    def __init__(self, weight: torch.Tensor) -> None:
        reorder = torch.ops.mkldnn._reorder_linear_weight
        self._weight: torch.Tensor = reorder(weight, self._BEST_FOR_ROWS)
        self._dtype = weight.dtype
        self._plain: torch.Tensor | None = None

    def matmul(
        self, x: torch.Tensor, bias: torch.Tensor | None, exchange: Exchange | None = None
    ) -> torch.Tensor:
        linear = torch.ops.mkldnn._linear_pointwise
        bias = None if bias is None else bias.to(self._dtype)
        y: torch.Tensor = linear(x.to(self._dtype), self._weight, bias, "none", [], "")
        return y.float()

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        if self._plain is None:  # only the embedding needs it
            self._plain = self._weight.to_dense()
        return F.embedding(indices, self._plain)

    def state(self) -> dict[str, torch.Tensor]:
        return {"weight": self._weight.to_dense()}
