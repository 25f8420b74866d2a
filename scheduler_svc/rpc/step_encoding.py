"""Encodes steps as the columns of `worker.proto`, and decodes their answers."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from itertools import chain

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.guesses.guess import DRAFTED
from scheduler_svc.core.sequence import Row
from scheduler_svc.core.step import Answer, Step
from scheduler_svc.rpc.step_features import (
    MalformedAnswerError,
    encode_features,
    read_hidden_states,
    read_logprobs,
)
from shared.paging import Paging
from shared.pb import worker_pb2


def encode_step(
    step: Step, paging: Paging, epoch: int, step_id: int, num_steps: int = 1
) -> worker_pb2.StepRequest:
    """Encodes a step of T tokens of S sequences, with T and S as in `worker.proto`, or a run of
    `num_steps` that begins with it."""
    rows, seqs = step.rows, [row.seq for row in step.rows]
    starts = np.array([row.start for row in rows], np.int32)
    query_lens = np.array([row.num_tokens for row in rows], np.int32)
    context_lens = starts + query_lens
    positions = starts
    if step.num_decodes < len(rows):  # start, start + 1, ... of each row, for all rows at once
        positions = np.arange(query_lens.sum(), dtype=np.int32)
        positions += np.repeat(starts - _offsets(query_lens)[:-1], query_lens)

    last_lens, kinds = context_lens + num_steps - 1, paging.tables
    num_blocks = np.concatenate([-(-last_lens // kind.block_size) for kind in kinds])
    tables = [seq.blocks.tables[number] for number in range(len(kinds)) for seq in seqs]
    if int(num_blocks.sum()) < sum(map(len, tables)):  # a prompt has blocks for later chunks too
        tables = [table[:n] for table, n in zip(tables, num_blocks.tolist(), strict=True)]
    block_table, table_offsets = b"".join(tables), _offsets(num_blocks)
    slots = []
    for number, kind in enumerate(kinds):
        first_blocks = table_offsets[number * len(rows) :][: len(rows)]
        if len(positions) > len(rows):
            first_blocks = np.repeat(first_blocks, query_lens)
        block_index, block_offset = np.divmod(positions, kind.block_size)
        blocks = np.frombuffer(block_table, np.int32)[first_blocks + block_index]
        slots.append(blocks * paging.slots_per_block + block_offset)

    request = worker_pb2.StepRequest(
        epoch=epoch,
        step_id=step_id,
        input_ids=array("i", chain.from_iterable(map(_input_ids, rows))).tobytes(),
        positions=positions.tobytes(),
        slot_mapping=np.concatenate(slots).astype(np.int32).tobytes(),
        query_lens=query_lens.tobytes(),
        context_lens=context_lens.tobytes(),
        block_table=block_table,
        block_table_offsets=table_offsets.tobytes(),
        samples=bytes([row.samples for row in rows]),
        temperatures=array("f", [seq.params.temperature for seq in seqs]).tobytes(),
        seeds=array("Q", [seq.params.seed for seq in seqs]).tobytes(),
        traceparents=step.traceparents,
        num_steps=num_steps,
    )
    if step.copies:
        request.copies = array("i", chain.from_iterable(step.copies)).tobytes()
    if step.has_features:
        encode_features(request, rows)
    return request


def read_answer(request: worker_pb2.StepRequest, response: worker_pb2.StepResponse) -> Answer:
    """Decodes the answer to a step.

    Raises:
        MalformedAnswerError: the answer does not fit the step.
    """
    token_ids: list[int] = np.frombuffer(response.token_ids, "<i4").tolist()
    if len(token_ids) != len(request.samples):
        raise MalformedAnswerError(f"{len(token_ids)} tokens for {len(request.samples)} rows")
    draft_ids: list[int] = np.frombuffer(response.draft_ids, "<i4").tolist()
    expected = np.count_nonzero(np.frombuffer(request.input_ids, "<i4") == DRAFTED)
    if len(draft_ids) != expected:
        raise MalformedAnswerError(f"{len(draft_ids)} drafted tokens, expected {expected}")
    pooled = read_hidden_states(request, response) if request.HasField("pooling") else {}
    if not (request.HasField("features") or request.HasField("prompt_logprobs")):
        return Answer(token_ids, draft_ids=draft_ids, hidden_states=pooled)
    return Answer(token_ids, *read_logprobs(request, response), draft_ids, pooled)


def _offsets(lengths: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """int32[n+1]: the start of each of n parts, then the end of the last."""
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def _input_ids(row: Row) -> Seq[int]:
    """The row's tokens. A token that the previous step is yet to sample is -1 - its row there."""
    if row.previous_row is not None:
        return (-1 - row.previous_row,)
    if row.draft is not None:
        return (row.draft,)
    return row.seq.tokens[row.start : row.start + row.num_tokens]
