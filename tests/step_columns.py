"""The columns of a step of `worker.proto` as arrays, and as text."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

from shared.pb import worker_pb2

Ints = NDArray[np.int64]


class StepColumns:
    """The columns of a step, and where its tokens and contexts lie in the cache."""

    def __init__(self, request: worker_pb2.StepRequest, block_size: int) -> None:
        self.request = request
        self._block_size = block_size
        self.input_ids = ints(request.input_ids)
        self.positions = ints(request.positions)
        self.slots = ints(request.slot_mapping)
        self.query_lens = ints(request.query_lens)
        self.context_lens = ints(request.context_lens)
        self.table = ints(request.block_table)
        self.offsets = ints(request.block_table_offsets)
        self.samples = np.frombuffer(request.samples, np.uint8)
        self.seeds = np.frombuffer(request.seeds, "<u8")
        self.copies = ints(request.copies).reshape(-1, 2)  # from block, to block

    def find_slots(self) -> None:
        """Finds the slots of the rows' contexts, concatenated, and of the tokens to be written."""
        self.attended_positions = _ranges(np.zeros_like(self.context_lens), self.context_lens)
        self.attended_slots = self._slots(self.attended_positions, self.context_lens)
        self.first_attended: Ints = np.cumsum(self.context_lens) - self.context_lens
        self.written_slots = self._slots(self.positions, self.query_lens)

    def row_name(self, place: np.int64) -> str:
        """Names the row whose context holds `place` of `attended_slots`."""
        return f"row {int(np.searchsorted(self.first_attended, place, 'right')) - 1}"

    def _slots(self, positions: Ints, lens: Ints) -> Ints:
        blocks = self.table[np.repeat(self.offsets[:-1], lens) + positions // self._block_size]
        slots: Ints = blocks * self._block_size + positions % self._block_size
        return slots


def steps_of(request: worker_pb2.StepRequest, block_size: int) -> list[worker_pb2.StepRequest]:
    """The steps of a message, each in a message of its own, with no block that it does not need."""
    steps = []
    columns, size = StepColumns(request, block_size), block_size
    rows = np.arange(len(columns.query_lens))
    for number in range(max(request.num_steps, 1)):
        step = worker_pb2.StepRequest()
        step.CopyFrom(request)
        lens, positions = columns.context_lens + number, columns.positions + number
        counts = -(-lens // size)
        tables = [columns.table[o : o + n] for o, n in zip(columns.offsets, counts, strict=False)]
        step.num_steps, step.step_id = 1, request.step_id + number
        step.block_table = np.concatenate(tables).astype("<i4").tobytes()
        step.block_table_offsets = np.cumsum([0, *counts]).astype("<i4").tobytes()
        if number:
            slots = [
                int(t[p // size]) * size + p % size for t, p in zip(tables, positions, strict=True)
            ]
            step.slot_mapping = np.array(slots, "<i4").tobytes()
            step.positions = positions.astype("<i4").tobytes()
            step.context_lens = lens.astype("<i4").tobytes()
            step.input_ids = (-1 - rows).astype("<i4").tobytes()
            step.ClearField("copies")
        steps.append(step)
    return steps


def describe(request: worker_pb2.StepRequest, names: Seq[str] | None = None) -> str:
    """Shows a step, which may be malformed, as text: one line per row."""
    input_ids, query_lens = ints(request.input_ids).tolist(), ints(request.query_lens).tolist()
    context_lens, table = ints(request.context_lens).tolist(), ints(request.block_table).tolist()
    offsets, slots = ints(request.block_table_offsets).tolist(), ints(request.slot_mapping)
    lines = [f"step {request.step_id} of epoch {request.epoch}: {len(query_lens)} rows"]
    if request.copies:
        lines[0] += f", copies {ints(request.copies).tolist()}"
    first = 0
    for row, (query_len, context_len) in enumerate(zip(query_lens, context_lens, strict=False)):
        span = slice(first, first + query_len)
        first += query_len
        lines.append(
            f"  row {row}{f' {names[row]}' if names else ''}: "
            f"positions {context_len - query_len}..{context_len - 1}, ids {input_ids[span]}, "
            f"slots {slots[span].tolist()}, blocks {table[slice(*offsets[row : row + 2])]}"
            f"{', samples' if any(request.samples[row : row + 1]) else ''}"
        )
    for name in ("features", "prompt_logprobs"):
        if request.HasField(name):
            lines.append(f"  {name} of rows {ints(getattr(request, name).rows).tolist()}")
    return "\n".join(lines)


def _ranges(starts: Ints, lens: Ints) -> Ints:
    """start, start + 1, ... for each row, concatenated."""
    steps = np.arange(lens.sum())
    ranges: Ints = steps + np.repeat(starts - (np.cumsum(lens) - lens), lens)
    return ranges


def ints(column: bytes) -> Ints:
    """Decodes an int32 column."""
    return np.frombuffer(column, "<i4").astype(np.int64)
