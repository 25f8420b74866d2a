"""Linear layers split across the tensor-parallel ranks (Shoeybi et al., "Megatron-LM", 2019)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from worker_svc.distributed import TensorParallel
from worker_svc.kernels.ops import Ops
from worker_svc.weights import WeightReader


@dataclass(frozen=True)
class Rows:
    """Rows [start, start + count) of a checkpoint's `{name}.weight` and `{name}.bias`."""

    name: str
    start: int
    count: int


class ColumnParallelLinear:
    """One matrix made of several in the checkpoint (q, k and v; gate and up), split by output
    feature: x [T, in], equal on all ranks -> this rank's outputs [T, sum of counts], parts side by
    side."""

    def __init__(
        self, reader: WeightReader, ops: Ops, parts: Sequence[Rows], in_features: int, *, bias: bool
    ) -> None:
        out_features = sum(part.count for part in parts)
        weight = torch.empty(out_features, in_features, dtype=reader.dtype, device=reader.device)
        self._bias = weight.new_empty(out_features) if bias else None
        row = 0
        for part in parts:
            end = row + part.count
            reader.read_into(weight[row:end], f"{part.name}.weight", start=part.start)
            if self._bias is not None:
                reader.read_into(self._bias[row:end], f"{part.name}.bias", start=part.start)
            row = end
        self._weight = ops.pack(weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._weight.matmul(x, self._bias)


class RowParallelLinear:
    """A matrix split by input feature: this rank's inputs [T, in / ranks] -> x Wᵀ + bias [T, out],
    summed over the ranks and equal on all of them."""

    def __init__(
        self,
        reader: WeightReader,
        ops: Ops,
        tp: TensorParallel,
        name: str,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
    ) -> None:
        share = in_features // tp.size
        weight = torch.empty(out_features, share, dtype=reader.dtype, device=reader.device)
        reader.read_into(weight, f"{name}.weight", dim=1, start=tp.rank * share)
        self._bias = None
        if bias and tp.rank == 0:  # so that it enters the sum once
            self._bias = weight.new_empty(out_features)
            reader.read_into(self._bias, f"{name}.bias")
        elif bias:
            reader.skip(f"{name}.bias")
        self._weight = ops.pack(weight)
        self._tp = tp

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._tp.all_reduce(self._weight.matmul(x, self._bias))
