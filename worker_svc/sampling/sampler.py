"""Logits -> token ids: greedy, or by temperature with a random number from seed and position alone.

Both pick in two levels, first a chunk of the vocabulary and then a token in it. The chunks are
those of `VocabPartition`, which do not depend on the number of ranks, so ranks exchange two numbers
per chunk and one candidate per sequence, never all logits, and sample the same token as one rank
would.
"""

from __future__ import annotations

import torch

from worker_svc.distributed import TensorParallel
from worker_svc.kernels.ops import Ops
from worker_svc.layers.embedding import VocabPartition


class Sampler:
    """Samples one token per row, equal on all ranks."""

    def __init__(self, vocab: VocabPartition, tp: TensorParallel, ops: Ops) -> None:
        self._vocab = vocab
        self._tp = tp
        self._ops = ops

    def __call__(
        self, logits: torch.Tensor, temperatures: torch.Tensor, uniforms: torch.Tensor
    ) -> torch.Tensor:
        """logits [S, shard_size] of this rank; per row a temperature [S] float32, 0 is greedy, and
        a random number [S] float64 in [0, 1) -> token ids [S] int32."""
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
    """Gathers both, [S, num_chunks] per rank -> [S, num_chunks * ranks] in the vocabulary's
    order."""
    if tp.size == 1:
        return maxima, sums
    # [ranks, 2, S, num_chunks]
    both = tp.all_gather(torch.stack((maxima, sums)))
    maxima, sums = both.permute(1, 2, 0, 3).flatten(2)
    return maxima, sums
