"""Weight matrices in the layout that this machine multiplies fastest with."""

from __future__ import annotations

from typing import Protocol

import numba
import torch
import torch.nn.functional as F

from worker_svc.kernels import cpu_linear
from worker_svc.kernels.views import bits


class PackedWeight(Protocol):
    """A weight matrix W [out_features, in_features] ready to be multiplied with."""

    def matmul(
        self, x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None
    ) -> torch.Tensor:
        """x [T, in] -> x Wᵀ + bias [out] + residual [T, out], in the dtype of x."""
        ...


def pack(weight: torch.Tensor) -> PackedWeight:
    """Packs `weight` [out, in]. The caller should let go of it, since this may be a copy."""
    if weight.device.type == "cpu":
        if weight.dtype == torch.bfloat16 and cpu_linear.is_best_for_this_cpu():
            return PanelWeight(weight)
        if torch._C._has_mkldnn:
            return OneDnnWeight(weight)
    return PlainWeight(weight)


class PlainWeight:
    """W as it is, through `F.linear`."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight

    def matmul(
        self, x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None
    ) -> torch.Tensor:
        y = F.linear(x, self._weight, bias)
        return y if residual is None else y.add_(residual)


class OneDnnWeight:
    """W in oneDNN's blocked layout: `F.linear` would reorder it in every call."""

    # The layout depends on the number of rows it is asked to be best for; 32 reads W fastest for
    # one row too.
    _BEST_FOR_ROWS = 32

    def __init__(self, weight: torch.Tensor) -> None:
        reorder = torch.ops.mkldnn._reorder_linear_weight
        self._weight: torch.Tensor = reorder(weight, self._BEST_FOR_ROWS)

    def matmul(
        self, x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None
    ) -> torch.Tensor:
        linear = torch.ops.mkldnn._linear_pointwise
        y: torch.Tensor
        if residual is None:
            y = linear(x, self._weight, bias, "none", [], "")
        else:
            y = linear.binary(x, residual, self._weight, bias, "add")
        return y


class PanelWeight:
    """W for `kernels.cpu_linear`."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._out_features = len(weight)
        self._packed = cpu_linear.pack_panels(weight)
        self._none = torch.empty(0, self._out_features, dtype=weight.dtype)

    def matmul(
        self, x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None
    ) -> torch.Tensor:
        out = x.new_empty(len(x), self._out_features)
        rows = cpu_linear.X_BLOCK_BYTES // (4 * x.shape[1])
        cpu_linear.linear(
            bits(x.contiguous()),
            self._packed,
            bits(self._none[:, 0] if bias is None else bias),
            bits(self._none if residual is None else residual),
            bits(out),
            cpu_linear.PIECES_PER_THREAD * numba.get_num_threads(),
            max(rows // cpu_linear.MOST_ROWS, 1) * cpu_linear.MOST_ROWS,
        )
        return out
