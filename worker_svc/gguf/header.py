"""Reads the header of a GGUF file: its keys and where its tensors are.

Source: docs/gguf.md of ggml. The package `gguf` reads headers too, but it makes several objects
per element, which takes seconds, and it bounds neither counts nor lengths.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from worker_svc.weights.gguf_types import READABLE

_MAX_BYTES = 1 << 26  # of a header; the largest vocabularies take a quarter
_MAX_TENSORS = 1 << 16
_MAX_KEYS = 1 << 12  # a hundred times those of most files
_MAX_ELEMENTS = 1 << 21  # of all arrays; the largest vocabularies have half
_ALIGNMENT = 32
_SCALARS = dict(enumerate("BbHhIif?", 0)) | {10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")


class GgufError(ValueError):
    """A GGUF file cannot be used. The message names the key or tensor."""


@dataclass(frozen=True)
class Tensor:
    """A tensor [rows, columns] or [size] whose bytes begin at `start` of `file`."""

    file: Path
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    start: int


@dataclass(frozen=True)
class Header:
    """The keys and the tensors of a GGUF file, by name. Arrays of numbers are numpy's."""

    keys: dict[str, Any]
    tensors: dict[str, Tensor]


def read_header(path: Path) -> Header:
    """Reads a file's header.

    Raises:
        GgufError: the file is not a GGUF file, is truncated or malformed, or has a tensor of a
            type that workers cannot read.
        OSError: the file cannot be read.
    """
    size = path.stat().st_size
    if size < 24:
        raise GgufError(f"not a GGUF file: {size} bytes")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        magic, version, num_tensors, num_keys = struct.unpack_from("<4sIQQ", data)
        if magic != b"GGUF":
            raise GgufError("not a GGUF file")
        if version not in (2, 3):
            raise GgufError(f"GGUF version {version} is not supported; 2 and 3 are")
        reader = _Reader(data, 24)
        keys = reader.keys(num_keys)
        places = reader.tensors(num_tensors)
    alignment = keys.get("general.alignment", _ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise GgufError(f"general.alignment: {alignment!r} is not a natural number")
    first = -(-reader.at // alignment) * alignment
    return Header(keys, {name: _tensor(path, name, *place, first, size) for name, place in places})


class _Reader:
    """Reads values one after the other."""

    def __init__(self, data: mmap.mmap, at: int) -> None:
        self._data = data
        self._end = min(len(data), _MAX_BYTES)
        self._place = "the header"
        self._elements = 0
        self.at = at

    def keys(self, count: int) -> dict[str, Any]:
        keys: dict[str, Any] = {}
        for number in range(count):
            self._place = f"key {number} of {count}"
            if number == _MAX_KEYS:
                raise GgufError(f"{count} keys; the limit is {_MAX_KEYS}")
            name = self._place = self._string()
            if name in keys:
                raise GgufError(f"{name}: the key occurs twice")
            (kind,) = self._numbers("I", 1)
            keys[name] = self._value(kind)
        return keys

    def tensors(self, count: int) -> list[tuple[str, tuple[tuple[int, ...], int, int]]]:
        """The name of each tensor with its dimensions, type and offset."""
        if count > _MAX_TENSORS:
            raise GgufError(f"{count} tensors; the limit is {_MAX_TENSORS}")
        tensors, names = [], set()
        for number in range(count):
            self._place = f"tensor {number} of {count}"
            name = self._place = self._string()
            if name in names:
                raise GgufError(f"{name}: the tensor occurs twice")
            names.add(name)
            (dimensions,) = self._numbers("I", 1)
            if not 1 <= dimensions <= 4:
                raise GgufError(f"{name}: {dimensions} dimensions are not in [1, 4]")
            shape = self._numbers("Q", dimensions)[::-1]
            (kind,), (offset,) = self._numbers("I", 1), self._numbers("Q", 1)
            tensors.append((name, (shape, kind, offset)))
        return tensors

    def _value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self._numbers(_SCALARS[kind], 1)[0]
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise GgufError(f"{self._place}: a value of the unknown type {kind}")
        (of,), (length,) = self._numbers("I", 1), self._numbers("Q", 1)
        self._elements += length
        if self._elements > _MAX_ELEMENTS:
            raise GgufError(
                f"{self._place}: {length} elements; the limit of all arrays is {_MAX_ELEMENTS}"
            )
        if of in _SCALARS:
            # As a list, numbers would take twenty times their bytes.
            dtype: np.dtype[Any] = np.dtype(f"<{_SCALARS[of]}")
            start = self._take(length * dtype.itemsize)
            return np.frombuffer(self._data, dtype, length, start).copy()
        if of != _STRING:
            raise GgufError(f"{self._place}: an array of the unsupported type {of}")
        return [self._string() for _ in range(length)]

    def _string(self) -> str:
        (length,) = _LENGTH.unpack_from(self._data, self._take(8))
        start = self._take(length)
        try:
            return self._data[start : self.at].decode()
        except UnicodeDecodeError as error:
            raise GgufError(f"{self._place}: not UTF-8: {error}") from error

    def _numbers(self, code: str, count: int) -> tuple[Any, ...]:
        start = self._take(count * struct.calcsize(code))
        return struct.unpack_from(f"<{count}{code}", self._data, start)

    def _take(self, size: int) -> int:
        """Moves on by `size` bytes -> where they begin."""
        start = self.at
        if size > self._end - start:
            raise GgufError(
                f"{self._place}: {size} bytes at byte {start}; the header must end at {self._end}"
            )
        self.at += size
        return start


def _tensor(
    file: Path, name: str, shape: tuple[int, ...], kind: int, offset: int, first: int, size: int
) -> Tensor:
    known = {int(each): each for each in GGMLQuantizationType}.get(kind)
    if known not in READABLE:
        raise GgufError(f"{name}: tensors of type {known.name if known else kind} are not served")
    block, block_bytes = GGML_QUANT_SIZES[known]
    columns = shape[-1] if len(shape) > 1 else 1
    if columns % block:
        raise GgufError(f"{name}: shape {list(shape)} is not rows of whole blocks of {block}")
    start, num_bytes = first + offset, prod(shape) // block * block_bytes
    if start + num_bytes > size:
        raise GgufError(
            f"{name}: cut short: it ends at byte {start + num_bytes}, the file at {size}"
        )
    return Tensor(file, known, shape, start)
