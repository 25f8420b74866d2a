"""Weights in memory that outlives the forks of a worker."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import structlog
import torch

from shared.process.kept import KeptDescriptors
from worker_svc.kept_memory.device import DeviceMemory, aligned, close, view
from worker_svc.weights.safetensors_file import DTYPES, NAMES

log = structlog.get_logger(__name__)

State = dict[str, torch.Tensor]

# Pieces are at most this large, or this part of all before, so that one message holds their
# descriptors. As much may stay unused.
_PIECE, _SHARE = 32 << 20, 40
_ALIGNMENT = 512  # bytes, as torch aligns tensors of a GPU; kernels are chosen by it


class WeightMemory:
    """The tensors of a model, then of its draft model, in the order in which loaders ask for
    them. If the device cannot protect them, each fork compares their sums."""

    def __init__(self, kept: KeptDescriptors, device: DeviceMemory) -> None:
        self._kept = kept
        self._device = device
        self._index: Any = None  # the one that `notes` has found
        self._descriptors: list[int] = []
        self._begin()

    def _begin(self) -> None:
        self._range = self._device.range()
        self._sizes: list[int] = []  # of the pieces in the range
        self._end = 0  # of the tensors in the range
        self._places: dict[int, int] = {}  # of these tensors, by address
        self._preparing: list[threading.Thread] = []
        self._states: list[list[tuple[str, str, list[int], int]]] | None = []  # None: given up
        close(self._descriptors)

    def notes(self, key: str) -> Any:
        """The notes that `keep` was given with this key, or None. Maps the weights."""
        index, descriptors = self._kept.read()
        if not index or index["key"] != [key, self._device.name]:
            close(descriptors)
            return None
        found = self._device.range(sum(index["sizes"]))
        try:
            for descriptor, size in zip(descriptors, index["sizes"], strict=True):
                found.attach(descriptor, size)
            if self._sums(found.memory, index["sizes"]) != index["sums"]:
                raise RuntimeError("they have changed")
        except RuntimeError as error:
            log.error("the kept weights cannot be used; loading them", reason=str(error))
            return None
        finally:
            close(descriptors)
        self._range, self._index = found, index
        return index["notes"]

    def states(self) -> Iterator[State]:
        """Yields what was added before `keep`, in order. Call it after `notes`."""
        memory = self._range.memory
        for state in self._index["states"]:
            yield {
                name: view(memory[place:], DTYPES[dtype], shape)
                for name, dtype, shape, place in state
            }

    def reserve(self, sizes: Sequence[int]) -> None:
        """Makes memory for `new` tensors of these sizes, in bytes. Another thread speeds it up,
        because that takes as long as reading the weights."""
        if self._device.device.type == "cpu" and self._grow(sum(map(_aligned, sizes))):
            piece, speed_up = self._range.memory[-self._sizes[-1] :], self._device.speed_up
            self._preparing.append(threading.Thread(target=speed_up, args=(piece,), daemon=True))
            self._preparing[-1].start()

    def new(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor on the host, in the memory if possible, to be filled and then added."""
        if self._device.device.type != "cpu":
            return torch.empty(tuple(shape), dtype=dtype)
        return self._take(shape, dtype)

    def add(self, state: State) -> State:
        """Adds tensors. Those that are not in the memory are copied -> the tensors in it."""
        entries, added = [], {}
        for name, tensor in state.items():
            kept = tensor
            if tensor.data_ptr() not in self._places:
                kept = self._take(tensor.shape, tensor.dtype).copy_(tensor)
            added[name] = kept
            place = self._places.get(kept.data_ptr(), 0)
            entries.append((name, NAMES[kept.dtype], list(kept.shape), place))
        if self._states is not None:
            self._states.append(entries)
        return added

    def give_up(self) -> None:
        """Keeps no weights. Those that were added stay valid."""
        self._states = None

    def keep(self, key: str, notes: object) -> None:
        """Makes the memory read-only, if the device can, also for what was added, and lets the next
        fork find it.

        Args:
            key: everything on which the weights depend.
            notes: for the next fork, as JSON.
        """
        for thread in self._preparing:
            thread.join()
        if self._states is not None and self._sizes:
            self._keep(key, notes)
        close(self._descriptors)

    def _keep(self, key: str, notes: object) -> None:
        memory = self._range.memory
        # Again, because memory may have been too fragmented while files were read.
        if reason := self._device.speed_up(memory):
            log.info("not all weights are in huge pages", reason=reason)
        index = {
            "key": [key, self._device.name],
            "notes": notes,
            "states": self._states,
            "sizes": self._sizes,
            "sums": self._sums(memory, self._sizes),
        }
        try:
            pieces = memory.split(self._sizes)
            for piece, descriptor in zip(pieces, self._descriptors, strict=True):
                self._device.protect(piece, descriptor)
            self._kept.write(index, self._descriptors)
        except OSError as error:
            log.warning("weights do not outlive this process", reason=str(error))

    def reset(self) -> None:
        """Empties the memory."""
        self._kept.clear()
        self._begin()

    def _sums(self, memory: torch.Tensor, sizes: Sequence[int]) -> list[int]:
        """The sum of each piece's int64 numbers, modulo 2⁶⁴, unless they are protected."""
        if self._device.protects:
            return []
        return [int(piece.view(torch.int64).sum()) for piece in memory.split(sizes)]

    def _take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A new tensor, in the range unless given up."""
        size = _aligned(math.prod(shape) * dtype.itemsize)
        missing = self._end + size - sum(self._sizes)
        if self._states is not None and missing > 0 and self._grow(missing):
            self._device.speed_up(self._range.memory[-self._sizes[-1] :])
        if self._states is None:
            return torch.empty(tuple(shape), dtype=dtype, device=self._device.device)
        tensor = view(self._range.memory[self._end :], dtype, shape)
        self._places[tensor.data_ptr()] = self._end
        self._end += size
        return tensor

    def _grow(self, num_bytes: int) -> bool:
        """Adds a piece of at least `num_bytes`. It is not much larger than those before, so that at
        most half of the memory of a small model is unused."""
        place = sum(self._sizes)
        size = max(num_bytes, min(place, _PIECE), place // _SHARE)
        size = aligned(size, self._device.granularity)
        try:
            self._descriptors.append(self._range.create(size))
        except OSError as error:
            log.warning("weights do not outlive this process", reason=str(error))
            self.give_up()
            return False
        self._sizes.append(size)
        return True


def _aligned(num_bytes: int) -> int:
    return aligned(num_bytes, _ALIGNMENT)
