"""The interface of memory that outlives the process that made it."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Protocol

import torch


class MemoryRange(Protocol):
    """A range of addresses, to which memory is mapped piece after piece. It is unmapped after the
    range and all tensors of its memory are gone."""

    @property
    def memory(self) -> torch.Tensor:
        """All memory that has been mapped, uint8 [bytes]."""
        ...

    def create(self, size: int) -> int:
        """Makes `size` bytes of memory, zeros, and maps them -> a descriptor, with which other
        processes can map them. Memory is freed once no process has its descriptor, and none has
        mapped it.

        Raises:
            OSError: other processes could not map it. Nothing has changed.
            RuntimeError: there is not enough memory.
        """
        ...

    def attach(self, descriptor: int, size: int) -> None:
        """Maps memory of another process.

        Raises:
            RuntimeError: it cannot be mapped.
        """
        ...


class DeviceMemory(Protocol):
    """Memory of a CPU or a GPU."""

    name: str  # of the device and its driver, whose memory no others can map
    device: torch.device
    granularity: int  # bytes; the sizes of pieces are multiples
    protects: bool  # whether `protect` does

    def range(self, size: int | None = None) -> MemoryRange:
        """Reserves addresses for `size` bytes; None: for all memory of the device.

        Raises:
            RuntimeError: there are not enough addresses.
        """
        ...

    def speed_up(self, memory: torch.Tensor) -> str:
        """Makes reads of pieces of memory faster, also while another thread writes to them -> why
        some are not faster, or an empty text."""
        ...

    def protect(self, piece: torch.Tensor, descriptor: int) -> None:
        """Makes a piece of memory read-only, here and wherever it is mapped, for good.

        Raises:
            OSError: it is read-only here alone.
        """
        ...


def view(memory: torch.Tensor, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """The first bytes of `memory` uint8, as a tensor."""
    return memory[: math.prod(shape) * dtype.itemsize].view(dtype).view(tuple(shape))


def aligned(num_bytes: int, alignment: int) -> int:
    return -(-num_bytes // alignment) * alignment


def close(descriptors: list[int]) -> None:
    """Closes descriptors, and empties the list."""
    while descriptors:
        os.close(descriptors.pop())
