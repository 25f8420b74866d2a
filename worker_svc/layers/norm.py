"""Root mean square normalization."""

from __future__ import annotations

import torch

from worker_svc.kernels.ops import Ops
from worker_svc.loader import WeightLoader


class RMSNorm:
    """x / rms(x) · weight, over the last dimension, computed in float32.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019).
    """

    def __init__(self, ops: Ops, weight: torch.Tensor, eps: float) -> None:
        self.weight = weight
        self._ops = ops
        self._eps = eps

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x and a residual to add to it, if any, both [T, size] -> (the normalized sum, the sum).
        `residual` is overwritten with the sum."""
        if residual is None:
            return self._ops.rms_norm(x, self.weight, self._eps), x
        return self._ops.add_rms_norm(x, residual, self.weight, self._eps), residual


def norm_weight(
    loader: WeightLoader, name: str, size: int, offset: int = 0, scale: float = 1.0
) -> torch.Tensor:
    """(offset + weight) · scale, where the weight is that of norm `name` in the checkpoint."""
    weight = loader.vector(f"{name}.weight", size)
    if (offset, scale) == (0, 1):
        return weight
    return loader.computed(lambda: (offset + weight.float()) * scale)
