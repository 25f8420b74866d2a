"""Log-probabilities of given tokens and of the likeliest tokens, with the vocabulary split across
the ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from worker_svc.kernels.ops import Ops
from worker_svc.layers.embedding import VocabPartition
from worker_svc.ranks.distributed import TensorParallel
from worker_svc.sampling.sampler import gather_chunks
from worker_svc.step.wire import Float32s, Int32s

# The maximum number of rows whose logits are in memory at once.
PIECE = 256


@dataclass(frozen=True)
class Logprobs:
    """Log-probabilities for N tokens. A row holds its token's log-probability first, and then those
    of the largest logits. All rows are as long as the row that requests the largest number."""

    counts: Int32s  # [N] on the host: how many of the largest logits the row requests
    ids: torch.Tensor  # [N, 1 + largest count] int32
    values: torch.Tensor  # [N, 1 + largest count] float32


def requested_entries(counts: Int32s, ids: Int32s, values: Float32s) -> tuple[Int32s, Float32s]:
    """Picks the entries that each row requests from `Logprobs` on the host, in order, flat."""
    requested: NDArray[np.bool_] = np.arange(ids.shape[1]) <= counts[:, None]
    return ids[requested], values[requested]


class LogprobScorer:
    """Log-softmax of the model's own logits, before any bias, penalty or mask, at temperature 1.

    Ranks exchange two numbers per chunk and k candidates, never all logits. The number of ranks
    does not change the results. Of equal logits, the one with the lower token id comes first.
    """

    def __init__(self, vocab: VocabPartition, tp: TensorParallel, ops: Ops) -> None:
        self._vocab = vocab
        self._tp = tp
        self._ops = ops

    def __call__(
        self, logits_of: Callable[[slice], torch.Tensor], tokens: torch.Tensor, counts: Int32s
    ) -> Logprobs:
        """Scores N tokens.

        Args:
            logits_of: a slice of the N rows -> this rank's logits [rows, shard_size].
            tokens: [N] int32.
            counts: [N], how many of the largest logits each row requests.
        """
        k = int(counts.max())
        pieces = [slice(start, start + PIECE) for start in range(0, len(tokens), PIECE)]
        parts = [self._score(logits_of(piece), tokens[piece], k) for piece in pieces]
        ids, values = (torch.cat(column) for column in zip(*parts, strict=True))
        return Logprobs(counts, ids, values)

    def _score(
        self, logits: torch.Tensor, tokens: torch.Tensor, k: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        vocab = self._vocab
        maxima, sums = self._ops.chunk_statistics(
            logits, vocab.chunk_size, vocab.num_tokens, torch.ones_like(tokens, dtype=torch.float32)
        )
        maxima_of_all, sums = gather_chunks(maxima, sums, self._tp)
        # The logarithm of the sum of exp(logit − largest), in float64.
        top = maxima_of_all.amax(dim=1, keepdim=True).double()
        log_sum = self._ops.sum_rows(sums * (maxima_of_all - top).exp())[:, None].log()
        ids, values = tokens[:, None], self._logits_of(tokens, logits)
        if k:
            top_ids, top_values = self._largest(logits, maxima, k)
            ids, values = torch.cat((ids, top_ids), 1), torch.cat((values, top_values), 1)
        return ids, ((values - top) - log_sum).float()

    def _logits_of(self, tokens: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """tokens [N] of any rank -> their logits [N, 1] float32."""
        columns = (tokens - self._vocab.start)[:, None]
        elsewhere = (columns < 0) | (columns >= self._vocab.num_tokens)
        values = logits.gather(1, columns.masked_fill(elsewhere, 0).long())
        return self._tp.all_reduce(values.float().masked_fill_(elsewhere, 0))

    def _largest(
        self, logits: torch.Tensor, maxima: torch.Tensor, k: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the ids and logits of the k largest over all ranks, both [N, k].

        They are in the k chunks with the largest maxima: these k maxima alone come before any token
        of another chunk. Sorts are stable, so that equal logits stay in the order of ids.
        """
        vocab = self._vocab
        chunks = maxima.sort(dim=1, descending=True, stable=True).indices[:, :k].sort(dim=1).values
        columns = chunks[:, :, None] * vocab.chunk_size
        columns = (columns + torch.arange(vocab.chunk_size, device=logits.device)).flatten(1)
        values = logits.gather(1, columns).float()
        values.masked_fill_(columns >= vocab.num_tokens, -torch.inf)
        values, order = values.sort(dim=1, descending=True, stable=True)
        values = values[:, :k]
        ids = (columns.gather(1, order[:, :k]) + vocab.start).int()
        if self._tp.size == 1:
            return ids, values
        ids, values = (
            self._tp.all_gather(part).transpose(0, 1).flatten(1) for part in (ids, values)
        )
        values, order = values.sort(dim=1, descending=True, stable=True)
        return ids.gather(1, order[:, :k]), values[:, :k]
