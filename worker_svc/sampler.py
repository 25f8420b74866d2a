"""Logits -> token ids: greedy, or by temperature with a random number of (seed, position) alone.

Both pick in two levels, first a chunk of the vocabulary and then a token in it. The chunks are
those of `VocabPartition`, which do not depend on the number of ranks, so ranks exchange one number
per chunk and one candidate per sequence, never all logits, and sample the same token as one rank
would.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from worker_svc.distributed import TensorParallel
from worker_svc.layers.embedding import VocabPartition


class Sampler:
    """Samples one token per row, equal on all ranks."""

    def __init__(self, vocab: VocabPartition, tp: TensorParallel) -> None:
        self._vocab = vocab
        self._tp = tp

    def __call__(
        self,
        logits: torch.Tensor,
        temperatures: NDArray[np.float32],
        seeds: NDArray[np.uint64],
        positions: NDArray[np.int32],
    ) -> torch.Tensor:
        """logits [N, shard_size] of this rank, -inf in the padding; per row a temperature (0 is
        greedy), a seed and the position of the token to sample -> token ids [N] int64."""
        chunks = logits.view(len(logits), self._vocab.num_chunks, self._vocab.chunk_size)
        maxima = self._gather_chunks(chunks.amax(dim=2))
        if not temperatures.any():
            return self._greedy(chunks, maxima)
        drawn = self._draw(chunks, maxima, temperatures, uniforms(seeds, positions))
        if temperatures.all():
            return drawn
        greedy = torch.from_numpy(temperatures == 0).to(logits.device)
        return torch.where(greedy, self._greedy(chunks, maxima), drawn)

    def _greedy(self, chunks: torch.Tensor, maxima: torch.Tensor) -> torch.Tensor:
        """The largest logit; of equal ones the lowest id, since argmax returns the first."""
        chunk = maxima.argmax(dim=1)
        return self._combine(chunk, self._chunk(chunks, chunk).argmax(dim=1))

    def _draw(
        self,
        chunks: torch.Tensor,
        maxima: torch.Tensor,
        temperatures: NDArray[np.float32],
        uniform: NDArray[np.float64],
    ) -> torch.Tensor:
        """Inverse of the cumulative distribution at `uniform`. Cumulative sums are in float64, so
        that a rounding error moves next to no mass from one token to another."""
        scale = torch.from_numpy(np.where(temperatures == 0, 1, temperatures)).to(chunks.device)
        scale = scale.unsqueeze(1)
        top = maxima.amax(dim=1, keepdim=True).float()
        weights = (chunks.float() - top.unsqueeze(2)).div_(scale.unsqueeze(2)).exp_()
        sums = self._gather_chunks(weights.sum(dim=2)).double()
        target = torch.from_numpy(uniform).to(chunks.device).unsqueeze(1) * sums.sum(
            1, keepdim=True
        )
        chunk, rest = _invert(sums, target)
        token, _ = _invert(self._chunk(weights, chunk).double(), rest)
        return self._combine(chunk, token)

    def _gather_chunks(self, local: torch.Tensor) -> torch.Tensor:
        """[N, num_chunks] per rank -> [N, num_chunks * ranks] in the vocabulary's order."""
        if self._tp.size == 1:
            return local
        return self._tp.all_gather(local).transpose(0, 1).flatten(1)

    def _chunk(self, chunks: torch.Tensor, chunk: torch.Tensor) -> torch.Tensor:
        """Row n's chunk number chunk[n] where this rank has it, else any -> [N, chunk_size]."""
        rows = torch.arange(len(chunks), device=chunks.device)
        local = chunk - self._tp.rank * self._vocab.num_chunks
        return chunks[rows, local.clamp(0, self._vocab.num_chunks - 1)]

    def _combine(self, chunk: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        """Token ids from each row's chunk and the token in it, which the chunk's rank found."""
        if self._tp.size > 1:
            owner = (chunk // self._vocab.num_chunks).unsqueeze(0)
            token = self._tp.all_gather(token).gather(0, owner).squeeze(0)
        return chunk * self._vocab.chunk_size + token


def _invert(weights: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """weights [N, K] >= 0, target [N, 1] -> the first index [N] at which the cumulative sum passes
    the target, and what is left of the target there [N, 1]. An index of weight 0 is never returned,
    not even when rounding puts the target past the end."""
    cumulative = weights.cumsum(dim=1)
    last = (weights > 0).long().mul_(torch.arange(1, weights.shape[1] + 1, device=weights.device))
    index = (cumulative <= target).sum(dim=1, keepdim=True)
    index = index.minimum(last.amax(dim=1, keepdim=True) - 1).clamp_(min=0)
    rest = target - cumulative.gather(1, index) + weights.gather(1, index)
    return index.squeeze(1), rest.clamp_(min=0)


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.int32]) -> NDArray[np.float64]:
    """One number in [0, 1) per row, a pure function of (seed, position).

    Two rounds of the SplitMix64 finalizer (Steele, Lea and Flood, "Fast Splittable Pseudorandom
    Number Generators", 2014): the seed is hashed first, so that neighbouring seeds do not give each
    other's numbers at neighbouring positions.
    """
    mixed = _splitmix64(_splitmix64(seeds) + positions.astype(np.uint64))
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _splitmix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = x + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
