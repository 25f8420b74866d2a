from __future__ import annotations

import pytest
import torch

from tests.worker_svc.kernels.precision import DTYPES, poisoned_memory
from worker_svc.kernels import embedding as module
from worker_svc.kernels.embedding import embed, embed_reference
from worker_svc.layers.embedding import VocabPartition

VOCAB = 1001


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [16, 100, 1024, 2560])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_one_rank_has_the_row(ranks: int, size: int, dtype: torch.dtype) -> None:
    """The parts of all ranks add up to the rows of the whole matrix. Ids at the ends of parts,
    given and sampled ones; rows past the vocabulary are NaN and never read."""
    whole = torch.randn(VOCAB, size, generator=torch.Generator().manual_seed(size)).to(dtype)
    parts = [VocabPartition(VOCAB, rank, ranks) for rank in range(ranks)]
    ends = [i for part in parts for i in (part.start, part.start + part.num_tokens - 1)]
    last_tokens = int32(7, VOCAB - 1, 3, ends[-2])
    input_ids = int32(*ends, -1, 5, -4, -2, 500)
    ids = [*ends, 7, 5, ends[-2], VOCAB - 1, 500]

    for function in (embed, embed_reference):
        total = torch.zeros(len(ids), size, dtype=dtype)
        for part in parts:
            weight = torch.full((part.shard_size, size), torch.nan, dtype=dtype)
            weight[: part.num_tokens] = whole[part.start : part.start + part.num_tokens]
            with poisoned_memory():
                total += function(input_ids, last_tokens, weight, part.start, part.num_tokens)
        assert torch.equal(total, whole[ids])


def test_the_first_step_has_no_last_tokens() -> None:
    weight = torch.arange(12.0).view(4, 3)
    for function in (embed, embed_reference):
        assert torch.equal(function(int32(3, 0), int32(), weight, 0, 4), weight[[3, 0]])


def test_no_tokens_launch_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_embed_kernel", None)
    assert embed(int32(), int32(), torch.ones(4, 3), 0, 4).shape == (0, 3)
