"""A KV cache in memory that outlives the forks of a worker."""

from __future__ import annotations

import math
import uuid
from collections.abc import Iterator, Sequence

import structlog
import torch

from shared.process.kept import KeptDescriptors
from worker_svc.kept_memory.device import DeviceMemory, aligned, close, view

log = structlog.get_logger(__name__)


class CacheMemory:
    """The tensors of a KV cache, each with memory of its own, and an id, which changes whenever the
    contents are lost."""

    def __init__(self, kept: KeptDescriptors, device: DeviceMemory) -> None:
        self._kept = kept
        self._device = device
        self._descriptors: list[int] = []  # of the tensors
        self._found: Iterator[int] | None = None  # those of the last fork, to be mapped
        self._is_kept = True

    @property
    def id(self) -> str:
        """The id of the kept cache; empty if there is none."""
        found = self._kept.value()
        return str(found["id"]) if found else ""

    def find(self, cache_id: str, num_blocks: int) -> bool:
        """Lets `tensor` map this cache of the last fork -> whether there is one."""
        close(self._descriptors)
        value, self._descriptors = self._kept.read()
        if value != {"id": cache_id, "blocks": num_blocks}:
            close(self._descriptors)
            return False
        self._found = iter([*self._descriptors])
        return True

    def forget(self) -> None:
        """Forgets what the cache contains. Its tensors stay valid, and `tensor` makes new ones."""
        self._kept.clear()
        close(self._descriptors)
        self._found, self._is_kept = None, True

    def new_id(self, num_blocks: int) -> str:
        """Lets the next fork find a cache of `num_blocks` blocks -> its new id."""
        cache_id = uuid.uuid4().hex
        if self._is_kept:
            try:
                self._kept.write({"id": cache_id, "blocks": num_blocks}, self._descriptors)
            except OSError as error:
                log.warning("the cache does not outlive this process", reason=str(error))
        return cache_id

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """The next tensor of the cache that `find` has found, or zeros.

        If there is a limit on the size of files, it has memory of its own, and no cache is kept.

        Raises:
            RuntimeError: there is no next tensor, it cannot be mapped, or memory is short.
        """
        num_bytes = math.prod(shape) * dtype.itemsize
        size = aligned(max(num_bytes, 1), self._device.granularity)
        place = self._device.range(size)
        try:
            if self._found is None:
                self._descriptors.append(place.create(size))
            elif (descriptor := next(self._found, None)) is not None:
                place.attach(descriptor, size)
            else:
                raise RuntimeError("the kept cache has fewer tensors")
        except OSError as error:
            if self._is_kept:
                log.warning("the cache does not outlive this process", reason=str(error))
            self._is_kept = False
            return torch.zeros(tuple(shape), dtype=dtype, device=self._device.device)
        return view(place.memory, dtype, shape)
