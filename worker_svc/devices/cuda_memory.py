"""Memory of a GPU that other processes can map, by CUDA's virtual memory management.

It is made by cuMemCreate and exported as a descriptor. The driver keeps its contents while any
process has that descriptor, or has mapped the memory.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from cuda.bindings import driver

from worker_svc.kept_memory.device import aligned

_FILE_DESCRIPTOR = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_CAN_EXPORT = (
    driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
)


class CudaRange:
    """Implements `MemoryRange`."""

    def __init__(self, size: int, properties: Any) -> None:
        self._properties = properties  # of its memory
        self._device = torch.device("cuda", properties.location.id)
        self._access = driver.CUmemAccessDesc()
        self._access.location = properties.location
        self._access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._begin = int(_call(driver.cuMemAddressReserve, size, 0, 0, 0))
        self._pieces: list[tuple[int, int]] = []  # addresses and sizes
        args = self._device, self._begin, size, self._pieces
        weakref.finalize(self, _unmap, *args).atexit = False  # the driver does it

    @property
    def memory(self) -> torch.Tensor:
        return torch.as_tensor(_Array(self, self._begin, self._size), device=self._device)

    @property
    def _size(self) -> int:
        return sum(size for _, size in self._pieces)

    def create(self, size: int) -> int:
        try:
            handle = _call(driver.cuMemCreate, size, self._properties, 0)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()  # torch holds memory that no tensor has
            handle = _call(driver.cuMemCreate, size, self._properties, 0)
        try:
            exported = int(_call(driver.cuMemExportToShareableHandle, handle, _FILE_DESCRIPTOR, 0))
        except RuntimeError as error:
            _call(driver.cuMemRelease, handle)
            raise OSError(str(error)) from error
        os.set_inheritable(exported, False)
        try:
            self._map(handle, size)
        except RuntimeError:
            os.close(exported)
            raise
        self.memory[-size:].zero_()
        return exported

    def attach(self, descriptor: int, size: int) -> None:
        handle = _call(driver.cuMemImportFromShareableHandle, descriptor, _FILE_DESCRIPTOR)
        self._map(handle, size)

    def _map(self, handle: Any, size: int) -> None:
        address = self._begin + self._size
        try:
            _call(driver.cuMemMap, address, size, 0, handle, 0)
        finally:
            _call(driver.cuMemRelease, handle)  # the mapping holds the memory
        self._pieces.append((address, size))
        _call(driver.cuMemSetAccess, address, size, [self._access], 1)


class CudaMemory:
    """Implements `DeviceMemory` for a GPU whose CUDA context is current.

    Raises:
        OSError, RuntimeError: the GPU, or its driver here, cannot export memory.
    """

    protects = False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        torch.zeros(1, device=device)  # makes the context
        number = _call(driver.cuDeviceGet, device.index)
        if not _call(driver.cuDeviceGetAttribute, _CAN_EXPORT, number):
            raise RuntimeError("the driver cannot export memory as a file descriptor")
        uuid = torch.cuda.get_device_properties(device).uuid
        self.name = f"{uuid}, driver {_call(driver.cuDriverGetVersion)}"
        self._properties = driver.CUmemAllocationProp()
        self._properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._properties.requestedHandleTypes = _FILE_DESCRIPTOR
        self._properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._properties.location.id = device.index
        recommended = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        arguments = self._properties, recommended
        self.granularity = int(_call(driver.cuMemGetAllocationGranularity, *arguments))
        os.close(self.range(self.granularity).create(self.granularity))  # may be forbidden

    def range(self, size: int | None = None) -> CudaRange:
        size = torch.cuda.mem_get_info(self.device)[1] if size is None else size
        return CudaRange(aligned(size, self.granularity), self._properties)

    def speed_up(self, memory: torch.Tensor) -> str:
        return ""

    def protect(self, piece: torch.Tensor, descriptor: int) -> None:
        pass


class _Array:
    """uint8 [size] on a GPU. Tensors that view it hold it, and it holds `owner`."""

    def __init__(self, owner: object, address: int, size: int) -> None:
        self._owner = owner
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
        }


def _unmap(device: torch.device, begin: int, size: int, pieces: Sequence[tuple[int, int]]) -> None:
    torch.cuda.synchronize(device)  # a kernel may still use them
    for piece in pieces:
        _call(driver.cuMemUnmap, *piece)
    _call(driver.cuMemAddressFree, begin, size)


def _call(function: Callable[..., tuple[Any, ...]], *arguments: object) -> Any:
    """Calls a function of the driver -> its result, if it has one.

    Raises:
        RuntimeError: it failed. torch.OutOfMemoryError: for lack of memory.
    """
    status, *results = function(*arguments)
    if status == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
        raise torch.OutOfMemoryError(f"{function.__name__}: {status.name}")
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"{function.__name__}: {status.name}")
    return results[0] if results else None
