from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.worker_svc.thread_ranks import random_logits
from worker_svc.kernels.cpu import ops as cpu_ops
from worker_svc.layers.embedding import VocabPartition
from worker_svc.ranks.distributed import TensorParallel
from worker_svc.sampling.sampler import Sampler
from worker_svc.step.uniforms import uniforms


@pytest.mark.parametrize("vocab", [2, 7, 301, 1000, 1536, 151_936])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_partition_covers_the_vocabulary_once(vocab: int, ranks: int) -> None:
    parts = [VocabPartition(vocab, rank, ranks) for rank in range(ranks)]
    ids = [i for p in parts for i in range(p.start, p.start + p.num_tokens)]
    assert ids == list(range(vocab))
    assert {p.chunk_size for p in parts} == {VocabPartition(vocab, 0, 1).chunk_size}


@pytest.mark.parametrize("temperature", [0.6, 1.0, 2.5])
def test_distribution(temperature: float) -> None:
    """Chi-square of the sampled tokens against softmax(logits / temperature)."""
    vocab, draws = 40, 20_000
    logits = random_logits(1, vocab, seed=5)
    random = uniforms(np.arange(draws, dtype=np.uint64), np.full(draws, 17, np.int32))
    sampler = Sampler(VocabPartition(vocab, 0, 1), TensorParallel(), cpu_ops)
    temperatures = torch.full((draws,), temperature)
    tokens = sampler(logits.expand(draws, -1).clone(), temperatures, torch.from_numpy(random))
    expected = draws * torch.softmax(logits[0].double() / temperature, 0).numpy()
    counts = np.bincount(tokens, minlength=vocab)
    # Cells of fewer than 5 expected draws are joined, as the test asks for.
    rare = expected < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    statistic = float(((observed - expected) ** 2 / np.maximum(expected, 1e-9)).sum())
    freedom = len(expected) - 1
    limit = freedom + 4 * (2 * freedom) ** 0.5  # mean and four standard deviations
    print(f"seeds 0..{draws - 1}, chi-square {statistic:.1f}, {freedom} degrees, limit {limit:.1f}")
    assert statistic < limit


def test_uniforms_are_uniform_and_independent() -> None:
    """Over seeds at one position, over positions of one seed, and between neighbours of both."""
    n = 1 << 16
    along_seeds = uniforms(np.arange(n, dtype=np.uint64), np.full(n, 3, np.int32))
    along_positions = uniforms(np.full(n, 3, np.uint64), np.arange(n, dtype=np.int32))
    shifted = uniforms(np.full(n, 4, np.uint64), np.arange(n, dtype=np.int32))
    for u in (along_seeds, along_positions):
        assert u.min() >= 0
        assert u.max() < 1
        counts = np.bincount((u * 64).astype(int), minlength=64)
        assert ((counts - n / 64) ** 2 / (n / 64)).sum() < 63 + 4 * 126**0.5
        assert abs(np.corrcoef(u[1:], u[:-1])[0, 1]) < 4 / n**0.5
    assert abs(np.corrcoef(along_positions, shifted)[0, 1]) < 4 / n**0.5
    # Seed s at position p + 1 must not be seed s + 1 at position p.
    assert not np.isin(along_positions[:100], shifted[:100]).any()
