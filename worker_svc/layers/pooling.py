"""Hidden states of whole prompts, of which embeddings are made."""

from __future__ import annotations

import numpy as np
import torch

from worker_svc.step.features import PooledRows
from worker_svc.step.wire import Int32s


def pool(
    pooled: PooledRows, last: torch.Tensor, hidden: torch.Tensor, query_lens: Int32s
) -> torch.Tensor:
    """Returns the hidden state of each pooled row's last token, or the sum of all its tokens', [P,
    size] float32.

    Args:
        last: the hidden states [S, size] of the rows' last tokens.
        hidden: those of all tokens [T, size]; read for sums only.
        query_lens: the step's column, [S].
    """
    # Without a tensor of indices, whose copy to a GPU would wait for the step.
    found = torch.cat([last[row : row + 1] for row in pooled.rows.tolist()]).float()
    ends = np.cumsum(query_lens)
    for place in np.flatnonzero(pooled.sums):
        row = pooled.rows[place]
        tokens = hidden[ends[row] - query_lens[row] : ends[row]]
        found[place] = tokens.sum(0, dtype=torch.float64)
    return found
