"""`kernels.ops.Ops` on a CPU."""

from __future__ import annotations

import numba
import torch

from worker_svc.kernels.cpu import linear as cpu_linear
from worker_svc.kernels.cpu.filtering import count_by_key, pick_bins, weigh_by_key
from worker_svc.kernels.cpu.fused import add_rms_norm, rms_norm, silu_and_multiply
from worker_svc.kernels.cpu.sampling import chunk_statistics, select_tokens
from worker_svc.kernels.cpu.simd import bits
from worker_svc.kernels.cpu.tokens import apply_masks, penalize, store_tokens
from worker_svc.kernels.ops import PackedWeight, PlainWeight

__all__ = [
    "add_rms_norm",
    "apply_masks",
    "chunk_statistics",
    "count_by_key",
    "embed",
    "pack",
    "penalize",
    "pick_bins",
    "rms_norm",
    "select_tokens",
    "silu_and_multiply",
    "store_tokens",
    "weigh_by_key",
]


def embed(
    input_ids: torch.Tensor,
    last_tokens: torch.Tensor,
    weight: PackedWeight,
    start: int,
    count: int,
) -> torch.Tensor:
    sampled = input_ids < 0
    if sampled.any():
        input_ids = input_ids.clone()
        input_ids[sampled] = last_tokens[-1 - input_ids[sampled]]
    local = input_ids - start
    elsewhere = (local < 0) | (local >= count)
    if not elsewhere.any():
        return weight.rows(local)
    return weight.rows(local.masked_fill(elsewhere, 0)).masked_fill_(elsewhere[:, None], 0)


def pack(weight: torch.Tensor) -> PackedWeight:
    if weight.dtype == torch.bfloat16 and cpu_linear.is_best_for_this_cpu():
        return PanelWeight(weight)
    if torch._C._has_mkldnn:
        return OneDnnWeight(weight)
    return PlainWeight(weight)


class OneDnnWeight:
    """W in oneDNN's blocked layout: `F.linear` would reorder it in every call."""

    # The layout depends on the number of rows it is asked to be best for; 32 reads W fastest for
    # one row too.
    _BEST_FOR_ROWS = 32

    def __init__(self, weight: torch.Tensor) -> None:
        reorder = torch.ops.mkldnn._reorder_linear_weight
        self._weight: torch.Tensor = reorder(weight, self._BEST_FOR_ROWS)

    def matmul(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        linear = torch.ops.mkldnn._linear_pointwise
        y: torch.Tensor = linear(x, self._weight, bias, "none", [], "")
        return y


class PanelWeight:
    """W in panels, for `kernels.cpu.linear`."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._out_features = len(weight)
        self._packed = cpu_linear.pack_panels(weight)
        self._no_bias = torch.empty(0, dtype=weight.dtype)

    def matmul(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out = x.new_empty(len(x), self._out_features)
        rows = cpu_linear.X_BLOCK_BYTES // (4 * x.shape[1])
        cpu_linear.linear(
            bits(x.contiguous()),
            self._packed,
            bits(self._no_bias if bias is None else bias),
            bits(out),
            cpu_linear.PIECES_PER_THREAD * numba.get_num_threads(),
            max(rows // cpu_linear.MAX_ROWS, 1) * cpu_linear.MAX_ROWS,
        )
        return out
