"""Memory in huge pages of 2 MiB.

Weights are read once per step, and a CPU needs a translation for each page that it reads. In a
virtual machine, finding those of pages of 4 KiB took about a twentieth of a step. Linux gives huge
pages to memory that asks for them by madvise(2), unless
/sys/kernel/mm/transparent_hugepage/enabled says `never`. Files on a disk do not have any on most
kernels, so what is mapped from one must be copied.
"""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch

_PAGE = 2 << 20
_CHUNK = 32 << 20  # bytes that smaller tensors share
_ALIGNMENT = 64

_unused = torch.empty(0, dtype=torch.uint8)  # of the last chunk


def _allocate(num_bytes: int) -> torch.Tensor:
    """uint8 [num_bytes], from the beginning of a page. A page takes no memory before its first
    use."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    mapped = mmap.mmap(-1, num_bytes + _PAGE, flags)
    with suppress(OSError):  # a kernel without huge pages
        mapped.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(mapped, dtype=torch.uint8)
    begin = -memory.data_ptr() % _PAGE
    return memory[begin : begin + num_bytes]


def copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of `tensor`. Copies share pages, which are freed with the last of them."""
    global _unused
    size = -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    if size > len(_unused):
        _unused = _allocate(max(size, _CHUNK))
    memory, _unused = _unused[:size], _unused[size:]
    moved = memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
    moved.copy_(tensor)
    return moved
