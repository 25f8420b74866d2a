"""The formats of quantized weights. Checkpoint readers make a `QuantizedWeight`, and the kernels of
each device pack it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Format = Literal["int8", "int6", "int4", "fp8"]


@dataclass(frozen=True)
class QuantizedWeight:
    """A matrix W [out, in]. With g = i // (in / groups), W[o, i] is

        (code[o, i] − zero[o, g]) · scale[o, g]

    format  codes                                                             zeros if None
    int8    int8 [out, in]                                                    0
    int6    int8 [out, in], −32 to 31                                         0, never given
    int4    uint8 [out, in / 2], the even i in the low half, each 0 to 15     8
    fp8     float8_e4m3fn [out, in]                                           0, never given

    Products with integer codes quantize x to 8 bits if the device multiplies integers (see
    `quantize_rows`). Products with fp8 codes use x itself, or x in 8 bits if the GPU supports it.
    """

    format: Format
    codes: torch.Tensor
    scales: torch.Tensor  # float32 [out, groups]
    zeros: torch.Tensor | None = None  # int16 [out, groups]

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)"""
        out, columns = self.codes.shape
        return out, columns * (2 if self.format == "int4" else 1)

    @property
    def group_size(self) -> int:
        """Inputs that share a scale."""
        return self.shape[1] // self.scales.shape[1]

    def dequantized(self) -> torch.Tensor:
        """W as float32 [out, in]."""
        codes = self.codes
        if self.format == "int4":
            codes = torch.stack((codes & 15, codes >> 4), dim=2).flatten(1)
        values = codes.float()
        if self.zeros is not None:
            values -= self.zeros.float().repeat_interleave(self.group_size, dim=1)
        elif self.format == "int4":
            values -= 8
        return values * self.scales.repeat_interleave(self.group_size, dim=1)


def quantize_rows(
    x: torch.Tensor, maxima: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, in] float32 -> codes int8 [T, in] and scales float32 [T].

    The largest magnitude of a row, or its entry in `maxima` float32 [T], becomes 127. The other
    numbers round to even. vLLM and compressed-tensors call this "dynamic per-token".
    """
    if maxima is None:
        maxima = x.abs().amax(dim=1)
    factors = torch.where(maxima > 0, 127 / maxima, 0)
    return (x * factors[:, None]).round_().to(torch.int8), maxima / 127
