"""Token embedding and output head, split across the ranks by vocabulary."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch

from worker_svc.kernels.ops import Ops, PackedWeight, PlainWeight
from worker_svc.loader import Rows, WeightLoader
from worker_svc.ranks.distributed import TensorParallel


@dataclass(frozen=True)
class VocabPartition:
    """The vocabulary in chunks of equal size, the last one padded, distributed to ranks in order.

    The sampler first picks a chunk and then a token in it. The chunks depend only on the
    vocabulary, so the sampler draws the same token for any number of ranks. There are about as many
    chunks as tokens in a chunk, so both picks are cheap.
    """

    vocab_size: int
    rank: int
    ranks: int

    @cached_property
    def chunk_size(self) -> int:
        """Tokens per chunk, the power of two nearest to the square root of the vocabulary size."""
        return int(2 ** round(math.log2(max(self.vocab_size, 2)) / 2))

    @cached_property
    def num_chunks(self) -> int:
        """Chunks per rank, equal on all ranks."""
        return math.ceil(math.ceil(self.vocab_size / self.chunk_size) / self.ranks)

    @property
    def shard_size(self) -> int:
        """Rows of this rank's matrices, padding included."""
        return self.num_chunks * self.chunk_size

    @property
    def start(self) -> int:
        """This rank's first token id."""
        return self.rank * self.shard_size

    @cached_property
    def num_tokens(self) -> int:
        """Tokens of this rank, padding excluded."""
        return min(max(self.vocab_size - self.start, 0), self.shard_size)

    def rows(self, name: str) -> Rows:
        """This rank's rows of matrix `name`."""
        return Rows(name, self.start if self.num_tokens else 0, self.num_tokens)


class VocabParallelEmbedding:
    """Token ids [T] int32 -> hidden states [T, hidden], equal on all ranks. A negative id −1−r
    stands for last_tokens[r]."""

    def __init__(
        self,
        loader: WeightLoader,
        ops: Ops,
        tp: TensorParallel,
        vocab: VocabPartition,
        name: str,
        hidden_size: int,
        scale: float = 1.0,
    ) -> None:
        self._scale = scale
        self.weight = loader.table(vocab.rows(name), vocab.shard_size, hidden_size)
        self._vocab = vocab
        self._ops = ops
        self._tp = tp

    def __call__(self, input_ids: torch.Tensor, last_tokens: torch.Tensor) -> torch.Tensor:
        vocab = self._vocab
        rows = vocab.start, vocab.num_tokens
        hidden = self._ops.embed(input_ids, last_tokens, self.weight, *rows, self._scale)
        return self._tp.all_reduce(hidden)


class VocabParallelHead:
    """Hidden states [S, hidden] -> this rank's logits [S, shard_size]. Logits of the padding are
    meaningless."""

    def __init__(self, weight: PackedWeight) -> None:
        self._weight = weight

    def __call__(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Writes the logits to the first rows of `out`, or to new memory if there is no `out`."""
        if out is None:
            return self._weight.matmul(hidden, None)
        if not isinstance(self._weight, PlainWeight):
            return out[: len(hidden)].copy_(self._weight.matmul(hidden, None))
        return self._weight.matmul_into(hidden, out[: len(hidden)])

    def difference(
        self, hidden: torch.Tensor, vocab: VocabPartition, ops: Ops, yes_id: int, no_id: int
    ) -> torch.Tensor:
        """Hidden states [S, hidden] -> what this rank adds to the logits of `yes_id` minus those of
        `no_id`, [S]. In float32, because logits in bfloat16 would often be equal."""
        hidden = hidden.float()

        def row(matrix: torch.Tensor, token: int) -> torch.Tensor:
            place = token - vocab.start
            if 0 <= place < vocab.num_tokens:
                return matrix[place].float()
            return torch.zeros_like(matrix[0], dtype=torch.float32)

        if isinstance(self._weight, PlainWeight):
            weight = self._weight.weight
            return ops.sum_rows(hidden * (row(weight, yes_id) - row(weight, no_id)))
        logits = self._weight.matmul(hidden, None).T
        return row(logits, yes_id) - row(logits, no_id)
