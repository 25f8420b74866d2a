"""Locates the tensors of a safetensors file and reads their bytes.

The library maps the file and copies from the mapping. That takes four times the CPU time of reading
straight into the target's memory, and a file that is truncated meanwhile ends the process.

Nothing in a file is trusted. The tensors that `read_tensors` returns lie inside the file and do not
overlap (as in safetensors/src/tensor.rs, `Metadata::validate`), and reads stay inside them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from worker_svc.errors import ModelError
from worker_svc.weights.shards import read_header

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "U16": torch.uint16,
    "U32": torch.uint32,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LARGE = 1 << 19  # bytes of a read, which takes longer than a look at the memory


@dataclass(frozen=True)
class Runs:
    """Runs of `size` bytes in a file that begin `stride` bytes apart."""

    start: int
    size: int
    stride: int

    def read(self, file: int, at: int, out: memoryview) -> bool:
        """Fills `out` with the bytes from number `at` on -> whether the file has all of them."""
        first, is_large = at, len(out) >= _LARGE
        while out:
            count = os.preadv(file, [out[: self.size - at % self.size]], self._place(at))
            if not count:
                return False
            at, out = at + count, out[count:]
        if is_large:
            memory = psutil.virtual_memory()
            if memory.available < memory.total // 2:
                # If Linux kept them until there is no memory left, weights would get no huge pages.
                begin = self._place(first)
                num_bytes = self._place(at - 1) + 1 - begin
                os.posix_fadvise(file, begin, num_bytes, os.POSIX_FADV_DONTNEED)
        return True

    def _place(self, at: int) -> int:
        """The place of byte number `at` in the file."""
        run, within = divmod(at, self.size)
        return self.start + run * self.stride + within


@dataclass(frozen=True)
class StoredTensor:
    """A tensor whose bytes begin at `start` of file `path`."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    def runs(self, ranges: Sequence[range]) -> Runs:
        """The bytes of `ranges` of the first two dimensions, with all of the other dimensions."""
        row = self.dtype.itemsize * math.prod(self.shape[1:])
        cell = self.dtype.itemsize * math.prod(self.shape[2:])
        rows, columns = (*ranges, range(1), range(1))[:2]
        start = self.start + rows.start * row
        if len(self.shape) < 2 or len(columns) == self.shape[1]:
            return Runs(start, len(rows) * row, 0)
        return Runs(start + columns.start * cell, len(columns) * cell, row)


def read_tensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file by name.

    Raises:
        ModelError: the file is not a safetensors file, is truncated, or has a malformed header.
    """
    header, first = read_header(path)
    size = path.stat().st_size - first
    tensors, ends = {}, {}
    for name, entry in header.items():
        dtype, shape, begin, end = _fields(f"{path.name}: {name}", entry)
        if end > size:
            raise ModelError(
                f"{path.name}: cut short: {name} ends at byte {first + end} of {first + size}"
            )
        tensors[name] = StoredTensor(path, dtype, shape, first + begin)
        ends[name] = first + end
    last = first
    for name in sorted(tensors, key=lambda name: (tensors[name].start, ends[name])):
        if tensors[name].start != last:
            raise ModelError(
                f"{path.name}: {name} begins at byte {tensors[name].start}, the data before it "
                f"ends at {last}"
            )
        last = ends[name]
    if last != first + size:
        raise ModelError(f"{path.name}: {first + size - last} bytes belong to no tensor")
    return tensors


def _fields(place: str, entry: Any) -> tuple[torch.dtype, tuple[int, ...], int, int]:
    """The dtype, shape and offsets in a tensor's `entry`. Checks that they give the same size."""
    try:
        name, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        numbers = [*shape, begin, end]
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{place}: dtype, shape and data_offsets are needed") from error
    if not isinstance(name, str) or name not in DTYPES:
        raise ModelError(f"{place}: dtype {name} is not one of {', '.join(DTYPES)}")
    if any(type(number) is not int or not 0 <= number < 1 << 63 for number in numbers):
        raise ModelError(f"{place}: shape {shape} and offsets {begin} to {end} have to be natural")
    if end - begin != math.prod(shape) * DTYPES[name].itemsize:
        raise ModelError(
            f"{place}: {name} of shape {shape} does not take the bytes {begin} to {end}"
        )
    return DTYPES[name], tuple(shape), begin, end
