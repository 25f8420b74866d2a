"""What is made of whole prompts: hidden states, of which embeddings are made, and scores."""

from __future__ import annotations

import numpy as np
import torch

from worker_svc.distributed import TensorParallel
from worker_svc.layers.embedding import VocabPartition
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
    pooled: PooledRows, logits: torch.Tensor, vocab: VocabPartition, tp: TensorParallel
) -> torch.Tensor:
    """Returns the scores of the Q pooled rows that have one, equal on all ranks, float32 [Q].

    Args:
        logits: this rank's, [S, shard_size].
    """
    none = logits.new_zeros(1, dtype=torch.float32)

    def logit(row: int, token: int) -> torch.Tensor:
        column = token - vocab.start
        here = token >= 0 and 0 <= column < vocab.num_tokens
        return logits[row, column : column + 1].float() if here else none

    columns = (pooled.rows.tolist(), pooled.yes_ids.tolist(), pooled.no_ids.tolist())
    found = [
        logit(row, yes) - logit(row, no) for row, yes, no in zip(*columns, strict=True) if yes >= 0
    ]
    return tp.all_reduce(torch.cat(found)) if found else none[:0]
