from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.worker_svc.thread_ranks import on_ranks, random_logits, shard
from worker_svc.kernels.cpu import ops as cpu_ops
from worker_svc.ranks.distributed import TensorParallel
from worker_svc.sampling.logprobs import PIECE, LogprobScorer, requested_entries

Scores = tuple[np.ndarray, np.ndarray]


def score(logits: torch.Tensor, tokens: list[int], counts: list[int], ranks: int = 1) -> Scores:
    """Cuts whole logits [N, vocab] over ranks; all must find the same, bit for bit."""

    def run(tp: TensorParallel) -> Scores:
        vocab, local = shard(logits, tp)
        scorer = LogprobScorer(vocab, tp, cpu_ops)
        found = scorer(lambda piece: local[piece], torch.tensor(tokens).int(), np.array(counts))
        return requested_entries(found.counts, found.ids.numpy(), found.values.numpy())

    first, *others = on_ranks(ranks, run)
    for other in others:
        assert all(map(np.array_equal, first, other))
    return first


def expected(
    logits: torch.Tensor, tokens: list[int], counts: list[int]
) -> tuple[list[int], list[float]]:
    """Sorts everything, lower ids first where logits are equal."""
    ids: list[int] = []
    values: list[float] = []
    logprobs = logits.double().log_softmax(1)
    for row, token, count in zip(logprobs, tokens, counts, strict=True):
        largest = row.sort(descending=True, stable=True).indices[:count].tolist()
        ids += [token, *largest]
        values += row[[token, *largest]].tolist()
    return ids, values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("vocab", "max_count"), [(7, 7), (301, 20), (301, 301), (5000, 400)])
def test_the_likeliest_and_the_token_itself(dtype: torch.dtype, vocab: int, max_count: int) -> None:
    """Many logits are equal in bfloat16. Ranks do not change a bit."""
    seed = vocab + max_count
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    logits = random_logits(24, vocab, seed).to(dtype)
    logits[0] = 1.0
    tokens = rng.integers(vocab, size=24).tolist()
    counts = [0, max_count, *rng.integers(max_count + 1, size=22).tolist()]
    ids, values = score(logits, tokens, counts)
    for several in (2, 3, 8) if vocab > 8 else (2,):
        assert all(map(np.array_equal, (ids, values), score(logits, tokens, counts, several)))
    expected_ids, expected_values = expected(logits, tokens, counts)
    assert ids.tolist() == expected_ids
    np.testing.assert_allclose(values, expected_values, atol=1e-5)


def test_pieces_do_not_change_a_bit() -> None:
    rows = 2 * PIECE + 3
    logits = random_logits(rows, 50, 6)
    tokens = [i % 50 for i in range(rows)]
    ids, values = score(logits, tokens, [2] * rows)
    for start in (0, PIECE - 1, 2 * PIECE):
        alone = score(logits[start : start + 2], tokens[start : start + 2], [2, 2])
        assert np.array_equal(alone[0], ids[3 * start : 3 * start + 6])
        assert np.array_equal(alone[1], values[3 * start : 3 * start + 6])


def test_huge_logits() -> None:
    logits = torch.tensor([[1e30, -1e30, 0.0, 1e30], [-5e4, -5e4, -5e4, -6e4]])
    ids, values = score(logits, [0, 3], [2, 1])
    assert ids.tolist() == [0, 0, 3, 3, 0]
    np.testing.assert_allclose(values[:3], -np.log(2), rtol=1e-6)
    np.testing.assert_allclose(values[3:], [-1e4 - np.log(3), -np.log(3)], rtol=1e-6)
