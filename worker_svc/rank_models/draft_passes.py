"""Splits a step with drafted tokens into the passes of the draft model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from worker_svc.step.arrays import StepArrays, rows_of


def with_places(step: StepArrays, first_place: int) -> StepArrays:
    """Replaces each DRAFTED id of `step` by -1-p, where p is the token's place in `last_tokens`.
    The places of drafted tokens begin at `first_place`, in the order of their rows."""
    drafted = step.drafted_rows
    if not len(drafted):
        return step
    ids = step.input_ids.copy()
    ids[step.first_tokens[drafted]] = -1 - first_place - np.arange(len(drafted), dtype=np.int32)
    return replace(step, input_ids=ids)


def passes(step: StepArrays, drafted: NDArray[np.intp], first_place: int) -> Iterator[StepArrays]:
    """Yields the passes that run all tokens of a step, in order, as steps without features. Their
    `places` are those of the tokens to draft.

    The first pass has the rows whose tokens are known, and the step's graph. Each later pass has
    the rows whose tokens the pass before has drafted: at most one row of each sequence.

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
        graph = None if depth else step.graph
        yield replace(rows_of(step, rows), graph=graph, places=places[rows + 1])
