from __future__ import annotations

import pytest
import torch

from worker_svc.errors import StartError
from worker_svc.kv_cache import TokenCache, blocks_that_fit, copy_blocks
from worker_svc.settings import WorkerSettings

MIB = 1 << 20


def fit(memory: int, **settings: int) -> int:
    """The number of blocks of 16 tokens and 1 MiB, for sequences of up to 100 tokens: 7 blocks
    each."""
    limits = WorkerSettings(**{"max_num_seqs": 4, **settings})
    return blocks_that_fit(limits, memory, block_bytes=MIB, block_size=16, max_model_len=100)


def test_as_many_as_fit_but_no_more_than_all_sequences_of_a_step_can_use() -> None:
    assert fit(10 * MIB) == fit(11 * MIB - 1) == 10
    assert fit(1000 * MIB) == 28
    assert fit(1000 * MIB, max_num_seqs=1) == 7
    assert fit(10 * MIB, kv_blocks=2000) == 2000  # as many as were asked for


def test_too_little_for_one_sequence() -> None:
    assert fit(7 * MIB) == 7
    with pytest.raises(StartError) as error:
        fit(5 * MIB)
    assert str(error.value).startswith(
        "memory: 2 MiB short: the KV cache of one sequence of 100 tokens takes 7 MiB, "
        "5 MiB are left for it"
    )
    with pytest.raises(StartError, match=r"10 MiB short.* 0 MiB are left"):
        fit(-3 * MIB)


def test_copied_blocks() -> None:
    """Copies keys, values and tokens of the blocks named, in every layer, and of no other."""
    caches = [torch.randn(2, 6, 3, 4, 5).bfloat16() for _ in range(2)]
    tokens = TokenCache(torch.arange(24, dtype=torch.int32), 4)
    before = [cache.clone() for cache in caches]
    sources, destinations = torch.tensor([[1, 1, 4], [0, 5, 2]], dtype=torch.int32)
    copy_blocks(caches, tokens, sources, destinations)
    held = [1, 1, 4, 3, 4, 1]  # which of the old blocks
    assert tokens.slots.tolist() == [4 * block + i for block in held for i in range(4)]
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(cache, old[:, held])
