"""Copies weights to a GPU through pinned memory. From other memory, CUDA copies small pieces one
after another, through a buffer of its own."""

from __future__ import annotations

import torch

BUFFER_BYTES = 64 << 20


class PinnedCopies:
    """Copies through two pinned buffers. One is filled while the GPU reads the other."""

    def __init__(self, buffer_bytes: int = BUFFER_BYTES) -> None:
        self._buffers = [
            torch.empty(buffer_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)
        ]
        self._copied = [torch.cuda.Event() for _ in self._buffers]
        self._copies = 0

    def __call__(self, out: torch.Tensor, source: torch.Tensor) -> None:
        """Copies source, a host tensor of any dtype, to out, a contiguous device tensor of equal
        shape. The GPU converts its dtype."""
        target, values = out.view(-1), source.reshape(-1)
        size = len(self._buffers[0]) // values.dtype.itemsize
        for start in range(0, len(values), size):
            part = values[start : start + size]
            number = self._copies % len(self._buffers)
            if self._copies >= len(self._buffers):
                self._copied[number].synchronize()
            buffer = self._buffers[number][: part.nbytes].view(part.dtype)
            buffer.copy_(part)
            if part.dtype != out.dtype:  # else the CPU would convert it
                buffer = buffer.to(out.device, non_blocking=True)
            target[start : start + size].copy_(buffer, non_blocking=True)
            self._copied[number].record()
            self._copies += 1
