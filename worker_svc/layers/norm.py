"""Root mean square normalization."""

from __future__ import annotations

import torch

from worker_svc.kernels.cpu_fused import rms_norm
from worker_svc.weights import WeightReader


class RMSNorm:
    """x / rms(x) · weight, over the last dimension, computed in float32.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019).
    """

    def __init__(self, reader: WeightReader, name: str, size: int, eps: float) -> None:
        self.weight = torch.empty(size, dtype=reader.dtype, device=reader.device)
        reader.read_into(self.weight, f"{name}.weight")
        self.eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, size] -> [T, size]"""
        return rms_norm(x, self.weight, self.eps)
