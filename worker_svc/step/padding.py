"""Pads steps to the sizes of CUDA graphs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shared.graph_sizes import GraphSize
from worker_svc.step.arrays import StepArrays, made_up_step, rows_of


def padded(step: StepArrays, size: GraphSize) -> StepArrays:
    """Pads `step` to a graph's size, without its features. Its rows of one token come first.

    An added decode has no context, and an added prompt has no tokens. The tokens after those of the
    last prompt are of no row. Nothing that is added writes to a slot, or to a place of a row.
    """
    num_rows, num_tokens = size.decodes + size.prompts, size.decodes + size.tokens
    if num_rows == step.num_seqs and not size.prompts:
        return step
    if size.prompts and not len(step.places):
        step = replace(step, places=np.arange(step.num_seqs, dtype=np.int32))
    decodes = int(np.count_nonzero(step.query_lens == 1))
    if (step.query_lens[:decodes] > 1).any():
        step = rows_of(step, np.argsort(step.query_lens > 1, kind="stable"))

    def pad(column: NDArray[Any], length: int, value: int = 0) -> NDArray[Any]:
        if column.ndim == 2:
            return np.concatenate([pad(of_table, length, value) for of_table in column])
        wide = np.full(length, value, column.dtype) if value else np.zeros(length, column.dtype)
        wide[:decodes] = column[:decodes]
        wide[size.decodes : size.decodes + len(column) - decodes] = column[decodes:]
        return wide

    query_lens = pad(step.query_lens, num_rows)
    query_lens[decodes : size.decodes] = 1
    tables = step.num_tables
    offsets = np.zeros(tables * num_rows + 1, np.int32)
    num_blocks = np.diff(step.block_table_offsets).reshape(tables, -1)
    np.cumsum(pad(num_blocks, num_rows), out=offsets[1:])
    return StepArrays(
        step_id=step.step_id,
        input_ids=pad(step.input_ids, num_tokens),
        positions=pad(step.positions, num_tokens),
        slot_mapping=pad(step.slot_mapping.reshape(tables, -1), num_tokens, -1),
        query_lens=query_lens,
        context_lens=pad(step.context_lens, num_rows),
        block_table=step.block_table,
        block_table_offsets=offsets,
        samples=pad(step.samples, num_rows),
        temperatures=pad(step.temperatures, num_rows),
        seeds=pad(step.seeds, num_rows),
        places=pad(step.places, num_rows, -1) if len(step.places) else step.places,
    )


def example(
    size: GraphSize, max_model_len: int, block_size: int, num_tables: int = 1
) -> StepArrays:
    """Makes a padded step with the longest prompt that its size can have. It writes nowhere, so it
    can run between two others."""
    lens = np.array([min(max(size.tokens, 1), max_model_len)], np.int32)
    step = made_up_step(lens, lens, block_size, num_tables=num_tables)
    nowhere = np.full_like(step.slot_mapping, -1)
    step = replace(step, slot_mapping=nowhere, places=nowhere[:1])
    return padded(step if size.prompts else replace(step, context_lens=lens * 0), size)
