"""Decodes arrays from little-endian bytes, and checks them."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from shared.errors import InvalidArgumentError

Int32s = NDArray[np.int32]
Float32s = NDArray[np.float32]
Scalar = TypeVar("Scalar", bound=np.generic)

INT32: np.dtype[np.int32] = np.dtype("<i4")
UINT32: np.dtype[np.uint32] = np.dtype("<u4")
UINT64: np.dtype[np.uint64] = np.dtype("<u8")
FLOAT32: np.dtype[np.float32] = np.dtype("<f4")
UINT8: np.dtype[np.uint8] = np.dtype("u1")


def decode_column(name: str, data: bytes, dtype: np.dtype[Scalar]) -> NDArray[Scalar]:
    """Decodes little-endian entries.

    Raises:
        InvalidArgumentError: `data` is not a whole number of entries. All errors of this module
            name the column.
    """
    if len(data) % dtype.itemsize:
        raise InvalidArgumentError(name, f"{len(data)} bytes, not a multiple of {dtype.itemsize}")
    return np.frombuffer(data, dtype)


def check_length(name: str, array: NDArray[Any], expected: int) -> None:
    if len(array) != expected:
        raise InvalidArgumentError(name, f"{len(array)} entries, expected {expected}")


def check_values(
    name: str, array: NDArray[Any], valid: NDArray[np.bool_] | np.bool_, meaning: object
) -> None:
    """Raises an error for the first entry of `array` that is not `valid`: it "is not {meaning}"."""
    if not valid.all():
        raise InvalidArgumentError(name, f"{array[~valid][0]} is not {meaning}")


def check_range(name: str, array: NDArray[Any], low: int, high: int) -> None:
    check_values(name, array, (array >= low) & (array <= high), f"in {low}..{high}")


def check_ascending(name: str, indices: Int32s, count: int) -> None:
    """Checks that each index is below `count` and above the previous index."""
    check_range(name, indices, 0, count - 1)
    if (np.diff(indices) <= 0).any():
        raise InvalidArgumentError(name, "not ascending")


def check_offsets(name: str, offsets: Int32s, parts: int, total: int) -> None:
    """Checks the offsets at which `parts` ragged rows begin in a column, and its end, `total`."""
    check_length(name, offsets, parts + 1)
    if offsets[0] != 0 or offsets[-1] != total or (offsets[1:] < offsets[:-1]).any():
        raise InvalidArgumentError(name, f"not rising from 0 to {total}")
