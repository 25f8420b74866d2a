"""What the layers ask of the device they run on."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F


class PackedWeight(Protocol):
    """A weight matrix W [out_features, in_features] in the layout that the device multiplies with
    fastest."""

    def matmul(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [T, in] -> x Wᵀ + bias [out], [T, out] in the dtype of x."""
        ...


class PlainWeight:
    """W as it is, through `F.linear`."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight

    def matmul(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return F.linear(x, self._weight, bias)


class Ops(Protocol):
    """The operations between matrix products and attention: modules of functions, of numba
    (`kernels.cpu_ops`) or Triton (`kernels.triton_ops`)."""

    def pack(self, weight: torch.Tensor) -> PackedWeight:
        """Packs `weight` [out, in]. The caller should let go of it, since this may be a copy."""
        ...

    def embed(
        self,
        input_ids: torch.Tensor,
        last_tokens: torch.Tensor,
        weight: torch.Tensor,
        start: int,
        count: int,
    ) -> torch.Tensor:
        """input_ids [T] int32 -> rows of weight, [T, hidden]. An id −1−r stands for last_tokens[r],
        ids outside [start, start + count) give zeros, the others row id − start."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x [T, size] / rms(x) · weight [size]"""
        ...

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Adds x to residual [T, size] in place -> the sum normalized, as `rms_norm` does."""
        ...

    def silu_and_multiply(self, gate_up: torch.Tensor) -> torch.Tensor:
        """gate_up [T, 2 · size], gate before up -> silu(gate) · up [T, size]"""
        ...

    def chunk_statistics(
        self, logits: torch.Tensor, chunk_size: int, num_tokens: int, temperatures: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """logits [S, C · chunk_size], of which the first num_tokens columns count, temperatures [S]
        float32 -> per chunk the largest logit m and the sum of exp((logit − m) / temperature), both
        [S, C] float32; where the temperature is 0 the sums mean nothing."""
        ...

    def select_tokens(
        self,
        logits: torch.Tensor,
        chunk_size: int,
        num_tokens: int,
        maxima: torch.Tensor,
        sums: torch.Tensor,
        first_chunk: int,
        temperatures: torch.Tensor,
        uniforms: torch.Tensor,
    ) -> torch.Tensor:
        """The statistics of all chunks of all ranks [S, C_all], of which this rank's begin at
        first_chunk, and a uniform number per row [S] float64 -> token ids [S] int32, −1 where the
        chosen chunk is another rank's."""
        ...
