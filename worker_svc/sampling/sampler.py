"""Samples token ids from logits, greedily or with a temperature. The random number depends only on
seed and position.

The sampler first picks a chunk of the vocabulary and then a token in it. Ranks exchange two numbers
per chunk and one candidate per sequence, never all logits. The chunks of `VocabPartition` do not
depend on the number of ranks, so the sampled token does not depend on it either.
"""

from __future__ import annotations

import torch

from worker_svc.kernels.ops import Ops
from worker_svc.layers.embedding import VocabPartition
from worker_svc.ranks.distributed import TensorParallel


class Sampler:
    """Samples one token per row, equal on all ranks."""

    def __init__(self, vocab: VocabPartition, tp: TensorParallel, ops: Ops) -> None:
        self._vocab = vocab
        self._tp = tp
        self._ops = ops

    def __call__(
        self, logits: torch.Tensor, temperatures: torch.Tensor, uniforms: torch.Tensor
    ) -> torch.Tensor:
        """This rank's logits [S, shard_size], temperatures [S] float32, where 0 is greedy, and
        random numbers [S] float64 in [0, 1) -> token ids [S] int32."""
        vocab = self._vocab
        maxima, sums = self._ops.chunk_statistics(
            logits, vocab.chunk_size, vocab.num_tokens, temperatures
        )
        tokens = self._ops.select_tokens(
            logits,
            vocab.chunk_size,
            vocab.num_tokens,
            *gather_chunks(maxima, sums, self._tp),
            self._tp.rank * vocab.num_chunks,
            temperatures,
            uniforms,
        )
        if self._tp.size == 1:
            return tokens
        return self._tp.all_gather(tokens).amax(0)  # −1 on all ranks but one


def gather_chunks(
    maxima: torch.Tensor, sums: torch.Tensor, tp: TensorParallel
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gathers maxima and sums [S, num_chunks] of all ranks -> both [S, num_chunks * ranks] in the
    vocabulary's order."""
    if tp.size == 1:
        return maxima, sums
    # [ranks, 2, S, num_chunks]
    both = tp.all_gather(torch.stack((maxima, sums)))
    maxima, sums = both.permute(1, 2, 0, 3).flatten(2)
    return maxima, sums
