"""Hidden states of whole prompts, of which embeddings are made, and scores of prompts."""

from __future__ import annotations

import numpy as np
import torch

from worker_svc.kernels.ops import Ops
from worker_svc.layers.embedding import VocabParallelHead, VocabPartition
from worker_svc.ranks.distributed import TensorParallel
from worker_svc.step.features import PooledRows
from worker_svc.step.wire import Int32s

# Rows and columns are found by slices: a tensor of indices would be copied to a GPU, and the copy
# would wait for the step.


def pool(
    pooled: PooledRows, last: torch.Tensor, hidden: torch.Tensor, query_lens: Int32s
) -> torch.Tensor:
    """Returns the hidden state of the last token of each of P pooled rows without a score, or the
    sum of all its tokens', float32 [P * size].

    Args:
        last: the hidden states [S, size] of the rows' last tokens.
        hidden: those of all tokens [T, size]; read for sums only.
        query_lens: the step's column, [S].
    """
    places = np.flatnonzero(pooled.yes_ids < 0)
    rows, sums = pooled.rows[places], pooled.sums[places]
    found = torch.cat([last[:0], *(last[row : row + 1] for row in rows.tolist())]).float()
    ends = np.cumsum(query_lens)
    for place in np.flatnonzero(sums):
        row = rows[place]
        tokens = hidden[ends[row] - query_lens[row] : ends[row]]
        found[place] = tokens.sum(0, dtype=torch.float64)
    return found.flatten()


def score(
    pooled: PooledRows,
    last: torch.Tensor,
    head: VocabParallelHead,
    vocab: VocabPartition,
    tp: TensorParallel,
    ops: Ops,
) -> torch.Tensor:
    """Returns the scores of the Q pooled rows that have one, equal on all ranks, float32 [Q].

    Args:
        last: the hidden states [S, size] of the rows' last tokens.
    """
    places = np.flatnonzero(pooled.yes_ids >= 0)
    columns = (pooled.yes_ids[places].tolist(), pooled.no_ids[places].tolist())
    pairs = [*zip(*columns, strict=True)]
    found = last.new_empty(len(pairs), dtype=torch.float32)
    for pair in dict.fromkeys(pairs):  # nearly always only one
        own = [i for i, each in enumerate(pairs) if each == pair]
        rows = pooled.rows[places[own]].tolist()
        of_pair = torch.cat([last[row : row + 1] for row in rows])
        values = head.difference(of_pair, vocab, ops, *pair)
        for i, value in zip(own, values.split(1), strict=True):
            found[i : i + 1] = value
    return tp.all_reduce(found) if pairs else found
