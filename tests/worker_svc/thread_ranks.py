"""Ranks that are threads of this process, and their parts of a vocabulary."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from worker_svc.layers.embedding import VocabPartition
from worker_svc.ranks.distributed import TensorParallel

Result = TypeVar("Result")


class ThreadRank(TensorParallel):
    def __init__(self, rank: int, parts: list[torch.Tensor], barrier: threading.Barrier) -> None:
        super().__init__(rank, len(parts))
        self._parts = parts
        self._barrier = barrier

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        self._parts[self.rank] = x
        self._barrier.wait()
        gathered = torch.stack(self._parts)
        self._barrier.wait()
        return gathered

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if self.defer is not None:
            return self.defer(self.all_reduce, x)
        return x.copy_(self.all_gather(x.clone()).sum(0))

    def all_reduce_max(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(self.all_gather(x.clone()).amax(0))


def on_ranks(ranks: int, run: Callable[[TensorParallel], Result]) -> list[Result]:
    """Calls `run` on every rank -> the results."""
    barrier, parts = threading.Barrier(ranks), [torch.empty(0)] * ranks
    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(lambda rank: run(ThreadRank(rank, parts, barrier)), range(ranks)))


def random_logits(rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def shard(logits: torch.Tensor, tp: TensorParallel) -> tuple[VocabPartition, torch.Tensor]:
    """A rank's part of whole logits [N, vocab], NaN in the padding."""
    vocab = VocabPartition(logits.shape[1], tp.rank, tp.size)
    local = logits.new_full((len(logits), vocab.shard_size), torch.nan)
    local[:, : vocab.num_tokens] = logits[:, vocab.start : vocab.start + vocab.num_tokens]
    return vocab, local


def on_parts(
    logits: torch.Tensor, ranks: int, change: Callable[[torch.Tensor, VocabPartition], None]
) -> torch.Tensor:
    """Calls `change` on each rank's part of whole logits [N, vocab] -> them together. Padding, and
    what lies between the rows of a part, is NaN and must stay so."""
    parts = []
    for rank in range(ranks):
        vocab = VocabPartition(logits.shape[1], rank, ranks)
        rows = logits.new_full((len(logits), vocab.shard_size + 16), torch.nan)
        part = rows[:, : vocab.num_tokens]
        part.copy_(logits[:, vocab.start : vocab.start + vocab.num_tokens])
        change(rows[:, : vocab.shard_size], vocab)
        assert rows[:, vocab.num_tokens :].isnan().all()
        parts.append(part)
    return torch.cat(parts, dim=1)
