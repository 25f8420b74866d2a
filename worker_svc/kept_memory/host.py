"""Memory of the host that outlives processes, in memory files (memfd_create(2)).

Weights lie in huge pages of 2 MiB, because a CPU needs a translation for each page that it reads.
In a virtual machine, finding those of pages of 4 KiB took about a twentieth of a step. Where Linux
does not give memory files huge pages, madvise(2) can still collapse theirs.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import weakref
from typing import Any

import psutil
import torch

from shared.process.kept import memory_file
from worker_svc.kept_memory.device import aligned

_HUGE = 2 << 20
# Constants of Linux that Python does not have.
_MADV_COLLAPSE, _MADV_POPULATE_WRITE, _MAP_FIXED = 25, 23, 0x10
_NOTHING = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_NO_ACCESS = 0

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long),
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class HostRange:
    """Implements `MemoryRange`, at the beginning of a huge page."""

    def __init__(self, size: int) -> None:
        reserved = _map(0, size + _HUGE, _NO_ACCESS, _NOTHING)
        weakref.finalize(self, _libc.munmap, reserved, size + _HUGE).atexit = False
        self._begin = aligned(reserved, _HUGE)
        self._size = 0

    @property
    def memory(self) -> torch.Tensor:
        array: Any = (ctypes.c_uint8 * self._size).from_address(self._begin)
        array.range = self  # as long as there is a tensor
        return torch.frombuffer(array, dtype=torch.uint8)

    def create(self, size: int) -> int:
        descriptor = memory_file("memory")
        try:
            os.ftruncate(descriptor, size)
            # A shorter file would end its readers.
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            self.attach(descriptor, size)
        except (OSError, RuntimeError):
            os.close(descriptor)
            raise
        return descriptor

    def attach(self, descriptor: int, size: int) -> None:
        if os.fstat(descriptor).st_size != size:  # reading after its end would be fatal
            raise RuntimeError(f"the memory file does not have {size} bytes")
        place = self._begin + self._size, size
        if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE:
            _map(*place, mmap.PROT_READ, mmap.MAP_PRIVATE, descriptor)
        else:
            _map(*place, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor)
        self._size += size


class HostMemory:
    """Implements `DeviceMemory` for a CPU."""

    name = "host"
    device = torch.device("cpu")
    granularity = _HUGE
    protects = True

    def range(self, size: int | None = None) -> HostRange:
        return HostRange(psutil.virtual_memory().total if size is None else size)

    def speed_up(self, memory: torch.Tensor) -> str:
        reason, begin = "", memory.data_ptr()
        for part in range(begin, begin + len(memory), _HUGE):  # in one call, a failure would end it
            # A huge page without any page cannot be collapsed.
            _libc.madvise(part, mmap.PAGESIZE, _MADV_POPULATE_WRITE)
            if _libc.madvise(part, _HUGE, _MADV_COLLAPSE):
                reason = os.strerror(ctypes.get_errno())
        return reason

    def protect(self, piece: torch.Tensor, descriptor: int) -> None:
        place = piece.data_ptr(), len(piece)
        _map(*place, _NO_ACCESS, _NOTHING)  # a writable mapping would keep it from being sealed
        try:
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL)
        finally:
            _map(*place, mmap.PROT_READ, mmap.MAP_PRIVATE, descriptor)


def _map(address: int, size: int, protection: int, flags: int, file: int = -1) -> int:
    """Maps a file at an address, or if that is 0 at any -> the address.

    Raises:
        RuntimeError: there is no address space or memory.
    """
    fixed = _MAP_FIXED if address else 0
    found: int | None = _libc.mmap(address, size, protection, flags | fixed, file, 0)
    if found is None or found == ctypes.c_void_p(-1).value:
        raise RuntimeError(f"{size} bytes cannot be mapped: {os.strerror(ctypes.get_errno())}")
    return found
