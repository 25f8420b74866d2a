"""A step on the wire -> checked arrays. Besides `server`, the only place that knows protobuf."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from shared.errors import FailedPreconditionError, InvalidArgumentError
from shared.pb.worker_pb2 import StepRequest

Int32s = NDArray[np.int32]
Scalar = TypeVar("Scalar", bound=np.generic)

INT32: np.dtype[np.int32] = np.dtype("<i4")
UINT64: np.dtype[np.uint64] = np.dtype("<u8")
FLOAT32: np.dtype[np.float32] = np.dtype("<f4")
UINT8: np.dtype[np.uint8] = np.dtype("u1")


@dataclass(frozen=True)
class StepLimits:
    """What a step of the current epoch may contain."""

    vocab_size: int
    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int


@dataclass(frozen=True)
class Step:
    """T tokens of S sequences; the columns of `StepRequest` as arrays on the host."""

    step_id: int
    input_ids: Int32s  # [T]; -1-r: the token sampled at row r of the previous step
    positions: Int32s  # [T]
    slot_mapping: Int32s  # [T]
    query_lens: Int32s  # [S]
    context_lens: Int32s  # [S]
    block_table: Int32s  # ragged
    block_table_offsets: Int32s  # [S+1]
    samples: NDArray[np.bool_]  # [S]
    temperatures: NDArray[np.float32]  # [S]
    seeds: NDArray[np.uint64]  # [S]

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def num_seqs(self) -> int:
        return len(self.query_lens)

    @property
    def decodes_only(self) -> bool:
        """Every sequence has one token."""
        return len(self.input_ids) == len(self.query_lens)


def decode_step(request: StepRequest, limits: StepLimits, previous: Step | None) -> Step:
    """Decodes and checks a step; `previous` is the one before it in the same epoch.

    Raises:
        FailedPreconditionError: the step is out of order.
        InvalidArgumentError: a column is malformed; the message names it.
    """
    expected_id = previous.step_id + 1 if previous else 1
    if request.step_id != expected_id:
        raise FailedPreconditionError(f"step_id: {request.step_id}, expected {expected_id}")
    samples = _column("samples", request.samples, UINT8)
    step = Step(
        step_id=request.step_id,
        input_ids=_column("input_ids", request.input_ids, INT32),
        positions=_column("positions", request.positions, INT32),
        slot_mapping=_column("slot_mapping", request.slot_mapping, INT32),
        query_lens=_column("query_lens", request.query_lens, INT32),
        context_lens=_column("context_lens", request.context_lens, INT32),
        block_table=_column("block_table", request.block_table, INT32),
        block_table_offsets=_column("block_table_offsets", request.block_table_offsets, INT32),
        samples=samples.view(np.bool_),
        temperatures=_column("temperatures", request.temperatures, FLOAT32),
        seeds=_column("seeds", request.seeds, UINT64),
    )
    if samples.max(initial=0) > 1:
        raise InvalidArgumentError("samples", "not 0 or 1")
    _check_lengths(step)
    _check_sequences(step, limits)
    _check_block_table(step, limits)
    _check_tokens(step, limits)
    _check_input_ids(step, limits, previous)
    return step


def _column(name: str, data: bytes, dtype: np.dtype[Scalar]) -> NDArray[Scalar]:
    if len(data) % dtype.itemsize:
        raise InvalidArgumentError(name, f"{len(data)} bytes, no multiple of {dtype.itemsize}")
    return np.frombuffer(data, dtype)


def _check_lengths(step: Step) -> None:
    if step.num_seqs == 0:
        raise InvalidArgumentError("query_lens", "a step has at least one sequence")
    for name in ("context_lens", "samples", "temperatures", "seeds"):
        _check_length(step, name, step.num_seqs)
    _check_length(step, "block_table_offsets", step.num_seqs + 1)
    for name in ("positions", "slot_mapping"):
        _check_length(step, name, step.num_tokens)


def _check_length(step: Step, name: str, expected: int) -> None:
    if len(getattr(step, name)) != expected:
        raise InvalidArgumentError(name, f"{len(getattr(step, name))} entries, expected {expected}")


def _check_sequences(step: Step, limits: StepLimits) -> None:
    if step.num_seqs > limits.max_num_seqs:
        raise InvalidArgumentError(
            "query_lens", f"{step.num_seqs} sequences, the limit is {limits.max_num_seqs}"
        )
    if step.num_tokens > limits.max_num_batched_tokens:
        raise InvalidArgumentError(
            "input_ids", f"{step.num_tokens} tokens, the limit is {limits.max_num_batched_tokens}"
        )
    if step.query_lens.min() < 1:
        raise InvalidArgumentError("query_lens", "every sequence has at least one token")
    if (total := int(step.query_lens.sum(dtype=np.int64))) != step.num_tokens:
        raise InvalidArgumentError(
            "query_lens", f"sum {total}, but input_ids has {step.num_tokens} tokens"
        )
    if (step.context_lens < step.query_lens).any():
        raise InvalidArgumentError("context_lens", "less than the tokens of this step")
    if (longest := step.context_lens.max()) > limits.max_model_len:
        raise InvalidArgumentError(
            "context_lens", f"{longest} tokens, the limit is {limits.max_model_len}"
        )
    # NaN fails the comparison too.
    if not ((step.temperatures >= 0) & np.isfinite(step.temperatures)).all():
        raise InvalidArgumentError("temperatures", "not finite, or negative")


def _check_block_table(step: Step, limits: StepLimits) -> None:
    offsets, table = step.block_table_offsets, step.block_table
    num_blocks = np.diff(offsets)
    if offsets[0] != 0 or offsets[-1] != len(table) or (num_blocks < 0).any():
        raise InvalidArgumentError(
            "block_table_offsets", f"not rising from 0 to {len(table)}, the length of block_table"
        )
    if (num_blocks.astype(np.int64) * limits.block_size < step.context_lens).any():
        raise InvalidArgumentError("block_table", "fewer blocks than the context of a sequence")
    if (most := -(-limits.max_model_len // limits.block_size)) < num_blocks.max():
        raise InvalidArgumentError(
            "block_table", f"{num_blocks.max()} blocks of one sequence, the limit is {most}"
        )
    # As unsigned, a negative one is too large.
    if table.view("<u4").max() >= limits.num_blocks:
        raise InvalidArgumentError(
            "block_table", f"a block out of range; there are {limits.num_blocks}"
        )


def _check_tokens(step: Step, limits: StepLimits) -> None:
    """Positions and slots follow from the other columns: whoever sends others has lost count."""
    ends = np.cumsum(step.query_lens)
    shift = step.context_lens - ends
    positions = np.arange(step.num_tokens) + np.repeat(shift, step.query_lens)
    if not np.array_equal(positions, step.positions):
        raise InvalidArgumentError("positions", "not the last query_lens positions of context_lens")
    first_block = np.repeat(step.block_table_offsets[:-1], step.query_lens)
    blocks = step.block_table[first_block + positions // limits.block_size].astype(np.int64)
    if not np.array_equal(
        blocks * limits.block_size + positions % limits.block_size, step.slot_mapping
    ):
        raise InvalidArgumentError(
            "slot_mapping", "not the slots of these positions in the sequence's block_table"
        )


def _check_input_ids(step: Step, limits: StepLimits, previous: Step | None) -> None:
    ids = step.input_ids
    if ids.max() >= limits.vocab_size:
        raise InvalidArgumentError(
            "input_ids", f"{ids.max()} is out of range; the vocabulary has {limits.vocab_size}"
        )
    rows = -1 - ids[ids < 0]
    if not len(rows):
        return
    if previous is None or rows.max() >= previous.num_seqs:
        raise InvalidArgumentError(
            "input_ids", f"row {rows.max()} of the previous step, which has no such row"
        )
    if not previous.samples[rows].all():
        raise InvalidArgumentError("input_ids", "a row of the previous step that sampled nothing")
