"""Uploads a step to the device. Its columns share one buffer, so that one copy suffices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from worker_svc.step.arrays import StepArrays
from worker_svc.step.uniforms import uniforms
from worker_svc.step.wire import Int32s

# In bytes. Every column begins at a multiple, because kernels are compiled for aligned addresses.
ALIGNMENT = 64


@dataclass(frozen=True)
class StepTensors:
    """The columns of a step of T tokens of S sequences, with K block tables each, on the device."""

    uniforms: torch.Tensor  # [S] float64, the random number of each sequence's next token
    seeds: torch.Tensor  # [S] int64, the bits of unsigned numbers
    temperatures: torch.Tensor  # [S] float32
    input_ids: torch.Tensor  # [T] int32, like all that follow
    positions: torch.Tensor  # [T]
    slot_mapping: torch.Tensor  # [K*T]
    query_starts: torch.Tensor  # [S+1]
    context_lens: torch.Tensor  # [S]
    plan_column: torch.Tensor  # the result of `AttentionBackend.plan_column`
    places: torch.Tensor  # [S], or empty: see `StepArrays`
    table_offsets: torch.Tensor  # [K*S+1]
    block_table: torch.Tensor  # ragged; the last column, so that no other moves with its length

    def of_table(self, number: int) -> StepTensors:
        """The step with one of its tables alone."""
        rows, tokens = len(self.context_lens), len(self.input_ids)
        if len(self.table_offsets) == rows + 1:
            return self
        return replace(
            self,
            slot_mapping=self.slot_mapping[number * tokens :][:tokens],
            table_offsets=self.table_offsets[number * rows :][: rows + 1],
        )


PLACES = [each.name for each in fields(StepTensors)].index("places")


def host_columns(step: StepArrays, plan_column: Int32s) -> list[NDArray[Any]]:
    """Makes a step's columns on the host, in the order of `StepTensors`."""
    query_starts = np.zeros(step.num_seqs + 1, np.int32)
    np.cumsum(step.query_lens, out=query_starts[1:])
    return [
        uniforms(step.seeds, step.context_lens),
        step.seeds,
        step.temperatures,
        step.input_ids,
        step.positions,
        step.slot_mapping,
        query_starts,
        step.context_lens,
        plan_column,
        step.places,
        step.block_table_offsets,
        step.block_table,
    ]


def pack(arrays: Sequence[NDArray[Any]], *, pinned: bool) -> torch.Tensor:
    """Packs arrays into one buffer [bytes] uint8 on the host. Pinned memory comes from torch's
    cache, which reuses a buffer only when no copy reads it any more."""
    offsets, size = _layout([array.nbytes for array in arrays])
    buffer = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
    data = buffer.numpy()
    for array, offset in zip(arrays, offsets, strict=True):
        data[offset : offset + array.nbytes] = array.reshape(-1).view(np.uint8)
    return buffer


def unpack(buffer: torch.Tensor, lengths: Sequence[int]) -> StepTensors:
    """Views `buffer` as columns of `lengths` entries. The buffer may be longer than the columns."""
    return StepTensors(*views(buffer, lengths, _DTYPES))


def views(
    buffer: torch.Tensor, lengths: Sequence[int], dtypes: Sequence[torch.dtype]
) -> list[torch.Tensor]:
    """Views each of the columns that `pack` put into `buffer`."""
    sizes = [length * dtype.itemsize for length, dtype in zip(lengths, dtypes, strict=True)]
    offsets, _ = _layout(sizes)
    return [
        buffer[offset : offset + size].view(dtype)
        for offset, size, dtype in zip(offsets, sizes, dtypes, strict=True)
    ]


def upload(
    arrays: Sequence[NDArray[Any]], device: torch.device, *, pinned: bool
) -> list[torch.Tensor]:
    """Uploads arrays to the device in one copy, flattened."""
    dtypes = [_TORCH_DTYPES[array.dtype] for array in arrays]
    if device.type == "cpu":  # on a CPU, views of a buffer cost more than copies
        return [
            torch.from_numpy(array.flatten()).view(dtype)
            for array, dtype in zip(arrays, dtypes, strict=True)
        ]
    buffer = pack(arrays, pinned=pinned).to(device, non_blocking=True)
    return views(buffer, [array.size for array in arrays], dtypes)


def upload_step(
    step: StepArrays, plan_column: Int32s, device: torch.device, *, pinned: bool = False
) -> StepTensors:
    """Uploads a step's columns to the device, with the attention backend's `plan_column`."""
    return StepTensors(*upload(host_columns(step, plan_column), device, pinned=pinned))


_TORCH_DTYPES = {
    np.dtype(np.float64): torch.float64,
    np.dtype(np.uint64): torch.int64,  # bit patterns, as below
    np.dtype(np.float32): torch.float32,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.uint32): torch.int32,
}
_WIDE = [torch.float64, torch.int64, torch.float32]
_DTYPES = _WIDE + [torch.int32] * (len(fields(StepTensors)) - len(_WIDE))


def _layout(sizes: Sequence[int]) -> tuple[list[int], int]:
    """The columns' sizes in bytes -> their offsets in bytes and the total size."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return offsets, end
