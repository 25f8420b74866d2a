"""Root mean square normalization."""

from __future__ import annotations

import torch

from worker_svc.kernels.ops import Ops
from worker_svc.loader import WeightLoader
from worker_svc.ranks.distributed import TensorParallel


class RMSNorm:
    """x / rms(x) · weight, over the last dimension, computed in float32. Without a weight, x.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019).
    """

    def __init__(self, ops: Ops, weight: torch.Tensor | None, eps: float) -> None:
        self.weight = weight
        self._ops = ops
        self._eps = eps

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x and a residual to add to it, if any, both [T, size] -> (the normalized sum, the sum).
        `residual` is overwritten with the sum."""
        if residual is None and self.weight is None:
            return x, x
        normalized = self._ops.rms_norm(x, residual, self.weight, self._eps)
        return normalized, x if residual is None else residual


class JointNorm:
    """Two norms: of all queries of a token, and of all its keys, whatever rank has their heads.

    Args:
        weight: this rank's part of both, queries first.
        sizes: how many of it are of queries, and of keys.
    """

    def __init__(
        self,
        ops: Ops,
        tp: TensorParallel,
        weight: torch.Tensor,
        sizes: tuple[int, int],
        eps: float,
    ) -> None:
        self._ops, self._tp, self._weight, self._eps = ops, tp, weight, eps
        self._sizes = sizes
        # Ranks may have copies of a head. They are copies in the sums of squares, too.
        self._total_sizes = sizes[0] * tp.size, sizes[1] * tp.size

    def __call__(self, qkv: torch.Tensor) -> torch.Tensor:
        """Normalizes the first columns of qkv [T, columns] in place -> qkv."""
        squares = self._tp.all_reduce(self._ops.sum_squares(qkv, self._sizes))
        sizes = self._sizes, self._total_sizes
        return self._ops.scale_parts(qkv, squares, self._weight, *sizes, self._eps)


def norm_weight(
    loader: WeightLoader, name: str, size: int, offset: int = 0, scale: float = 1.0
) -> torch.Tensor:
    """(offset + weight) · scale, where the weight is that of norm `name` in the checkpoint."""
    weight = loader.vector(f"{name}.weight", size)
    if (offset, scale) == (0, 1):
        return weight
    return loader.computed(lambda: (offset + weight.float()) * scale)
