"""Splits a step with drafted tokens into the passes of the draft model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from worker_svc.step.decode import StepArrays, ranges
from worker_svc.step.wire import Int32s


@dataclass(frozen=True)
class Pass:
    """A step of the draft model, without features."""

    step: StepArrays
    rows: Int32s  # [N] of `step`, after each of which a token is drafted
    places: Int32s  # [N], where these tokens go in `last_tokens`


def with_places(step: StepArrays, first_place: int) -> StepArrays:
    """Replaces each DRAFTED id of `step` by -1-p, where p is the token's place in `last_tokens`.
    The places of drafted tokens begin at `first_place`, in the order of their rows."""
    drafted = step.drafted_rows
    if not len(drafted):
        return step
    ids = step.input_ids.copy()
    ids[_first_tokens(step)[drafted]] = -1 - first_place - np.arange(len(drafted), dtype=np.int32)
    return replace(step, input_ids=ids)


def passes(step: StepArrays, drafted: NDArray[np.intp], first_place: int) -> Iterator[Pass]:
    """Yields the passes that run all tokens of a step, in order.

    The first pass has the rows whose tokens are known. Each later pass has the rows whose tokens
    the pass before has drafted: at most one row of each sequence.

    Args:
        step: a result of `with_places`.
        drafted: the rows that had DRAFTED ids, ascending.
    """
    places = np.full(step.num_seqs + 1, -1, np.int32)  # of the rows' tokens, or -1; one more
    places[drafted] = first_place + np.arange(len(drafted), dtype=np.int32)
    numbers = np.arange(step.num_seqs)
    last_known = np.maximum.accumulate(np.where(places[:-1] < 0, numbers, 0))
    depths = numbers - last_known
    for depth in range(depths.max() + 1):
        rows = np.flatnonzero(depths == depth)
        following = places[rows + 1]
        proposing = np.flatnonzero(following >= 0).astype(np.int32)
        yield Pass(rows_of(step, rows), proposing, following[proposing])


def rows_of(step: StepArrays, rows: NDArray[np.intp]) -> StepArrays:
    """The step of some rows of `step`, without copies, features and prompt targets."""
    lens, starts = step.query_lens[rows], step.block_table_offsets[rows]
    tokens = ranges(_first_tokens(step)[rows], lens)
    num_blocks = step.block_table_offsets[rows + 1] - starts
    return StepArrays(
        step_id=step.step_id,
        input_ids=step.input_ids[tokens],
        positions=step.positions[tokens],
        slot_mapping=step.slot_mapping[tokens],
        query_lens=lens,
        context_lens=step.context_lens[rows],
        block_table=step.block_table[ranges(starts, num_blocks)],
        block_table_offsets=np.concatenate(([0], np.cumsum(num_blocks))).astype(np.int32),
        samples=step.samples[rows],
        temperatures=step.temperatures[rows],
        seeds=step.seeds[rows],
    )


def _first_tokens(step: StepArrays) -> Int32s:
    """The index [S] of each row's first token."""
    starts: Int32s = np.cumsum(step.query_lens, dtype=np.int32) - step.query_lens
    return starts
