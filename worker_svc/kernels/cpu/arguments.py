"""The arguments of the C++ kernels. All fields of a structure have eight bytes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch


def fields(names: str) -> list[tuple[str, type]]:
    """Fields that are int64 or pointers."""
    return [(name, ctypes.c_int64) for name in names.split()]


class Step(ctypes.Structure):
    """`native/step.h`. A kernel may need only some of the fields."""

    _fields_ = fields(
        "tokens sequences input_ids last_tokens positions slots query_starts context_lens "
        "block_table table_offsets temperatures uniforms"
    )


def _pointer_to(dtype: torch.dtype) -> Callable[[torch.Tensor], int]:
    def pointer(tensor: torch.Tensor) -> int:
        assert tensor.dtype == dtype
        assert tensor.is_contiguous()
        return tensor.data_ptr()

    return pointer


# Each takes a contiguous tensor and returns the address of its first number.
int32s = _pointer_to(torch.int32)
int64s = _pointer_to(torch.int64)
float32s = _pointer_to(torch.float32)
float64s = _pointer_to(torch.float64)


def rows_of(tensor: torch.Tensor) -> tuple[int, int]:
    """The address of the first row of [R, size] float32, and the distance between rows."""
    assert tensor.dtype == torch.float32
    assert tensor.stride(1) == 1 or tensor.shape[1] == 1
    return tensor.data_ptr(), tensor.stride(0)
