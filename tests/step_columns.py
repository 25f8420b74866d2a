"""The columns of a step of `worker.proto` as arrays, and as text."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

from shared.paging import Paging
from shared.pb import worker_pb2

Ints = NDArray[np.int64]


class StepColumns:
    """The columns of a step with one of its tables, and where its tokens and contexts lie in the
    cache."""

    def __init__(self, request: worker_pb2.StepRequest, paging: Paging, number: int = 0) -> None:
        self.request = request
        self.slots_per_block = paging.slots_per_block
        self.kind = paging.tables[number]
        self.input_ids = ints(request.input_ids)
        self.positions = ints(request.positions)
        self.query_lens = ints(request.query_lens)
        self.context_lens = ints(request.context_lens)
        rows, tokens = len(self.query_lens), len(self.positions)
        self.slots = ints(request.slot_mapping)[number * tokens :][:tokens]
        self.table = ints(request.block_table)
        self.offsets = ints(request.block_table_offsets)[number * rows :][: rows + 1]
        self.samples = np.frombuffer(request.samples, np.uint8)
        self.seeds = np.frombuffer(request.seeds, "<u8")
        self.copies = ints(request.copies).reshape(-1, 2)  # from block, to block

    def find_slots(self, whole: Seq[int]) -> None:
        """Finds the slots of the contexts that the rows see, concatenated, and of the tokens to be
        written. The rows `whole` see all their tokens."""
        starts = np.zeros_like(self.context_lens)
        if self.kind.window:
            starts = np.maximum(self.context_lens - self.query_lens - self.kind.window + 1, 0)
        starts[list(whole)] = 0
        self.first_seen: Ints = starts
        self.attended_lens: Ints = self.context_lens - starts
        self.attended_positions = _ranges(starts, self.attended_lens)
        self.attended_slots = self.slots_at(self.attended_positions, self.attended_lens)
        self.first_attended: Ints = np.cumsum(self.attended_lens) - self.attended_lens

    def row_name(self, place: np.int64) -> str:
        """Names the row whose context holds `place` of `attended_slots`."""
        return f"row {int(np.searchsorted(self.first_attended, place, 'right')) - 1}"

    def slots_at(self, positions: Ints, lens: Ints) -> Ints:
        """The slots of so many positions of each row."""
        index, offset = np.divmod(positions, self.kind.block_size)
        blocks = self.table[np.repeat(self.offsets[:-1], lens) + index]
        slots: Ints = blocks * self.slots_per_block + offset
        return slots


def tables_of(request: worker_pb2.StepRequest, paging: Paging) -> list[StepColumns]:
    """The columns of a step with each of its tables."""
    return [StepColumns(request, paging, number) for number in range(len(paging.tables))]


def steps_of(request: worker_pb2.StepRequest, paging: Paging) -> list[worker_pb2.StepRequest]:
    """The steps of a message, each in a message of its own, with no block that it does not need."""
    steps = []
    columns = tables_of(request, paging)
    rows = np.arange(len(columns[0].query_lens))
    for number in range(max(request.num_steps, 1)):
        step = worker_pb2.StepRequest()
        step.CopyFrom(request)
        lens = columns[0].context_lens + number
        positions = columns[0].positions + number
        counts = [-(-lens // each.kind.block_size) for each in columns]
        step.num_steps, step.step_id = 1, request.step_id + number
        step.block_table_offsets = np.cumsum([0, *np.concatenate(counts)]).astype("<i4").tobytes()
        if number:
            slots = [each.slots_at(positions, np.ones_like(lens)) for each in columns]
            step.slot_mapping = np.concatenate(slots).astype("<i4").tobytes()
            step.positions = positions.astype("<i4").tobytes()
            step.context_lens = lens.astype("<i4").tobytes()
            step.input_ids = (-1 - rows).astype("<i4").tobytes()
            step.ClearField("copies")
        step.block_table = b"".join(
            each.table[offset : offset + count].astype("<i4").tobytes()
            for each, of_table in zip(columns, counts, strict=True)
            for offset, count in zip(each.offsets, of_table, strict=False)
        )
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
