"""Linear layers split across the tensor-parallel ranks (Shoeybi et al., "Megatron-LM", 2019)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from worker_svc.kernels.ops import Exchange
from worker_svc.loader import Rows, WeightLoader
from worker_svc.ranks.distributed import TensorParallel


class ColumnParallelLinear:
    """A matrix split by output feature, made of several matrices in the checkpoint (q, k and v, or
    gate and up).

    x [T, in], equal on all ranks -> this rank's outputs [T, sum of counts], parts side by side.
    """

    def __init__(
        self, loader: WeightLoader, parts: Sequence[Rows], in_features: int, *, bias: bool
    ) -> None:
        self._bias = None
        if bias:
            biases = [loader.vector(f"{p.name}.bias", p.count, p.start) for p in parts]
            self._bias = torch.cat(biases)
        self._weight = loader.matrix(parts, in_features)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._weight.matmul(x, self._bias)


class RowParallelLinear:
    """A matrix split by input feature.

    This rank's inputs [T, in / ranks] -> x Wᵀ + bias [T, out], summed over the ranks and equal on
    all ranks.
    """

    def __init__(
        self,
        loader: WeightLoader,
        tp: TensorParallel,
        name: str,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
    ) -> None:
        share = in_features // tp.size
        columns = range(tp.rank * share, (tp.rank + 1) * share)
        self._bias = None
        if bias and tp.rank == 0:  # so that the sum over ranks has the bias once
            self._bias = loader.vector(f"{name}.bias", out_features)
        elif bias:
            loader.skip(f"{name}.bias")
        self._weight = loader.matrix([Rows(name, 0, out_features)], in_features, columns)
        self._tp = tp
        self._exchange = None
        if tp.size > 1:
            self._exchange = Exchange(columns.start, in_features, tp.all_reduce_max)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._tp.all_reduce(self._weight.matmul(x, self._bias, self._exchange))
