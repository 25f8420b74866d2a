from __future__ import annotations

import pytest
import torch

from shared.paging import Paging
from worker_svc.errors import StartError
from worker_svc.kv_cache import CacheLayout, TokenCache, blocks_that_fit, copy_blocks
from worker_svc.settings import WorkerSettings

MIB = 1 << 20


def fit(memory: int, **settings: int) -> int:
    """The number of blocks of 16 tokens and 1 MiB, for sequences of up to 100 tokens: 7 blocks
    each."""
    limits = WorkerSettings(**{"max_num_seqs": 4, **settings})
    return blocks_that_fit(limits, memory, block_bytes=MIB, paging=Paging(16), max_model_len=100)


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


@pytest.mark.parametrize(
    ("windows", "paging", "num_tensors"),
    [
        ([None] * 3, Paging(16), 3),
        ([1000, None], Paging(16), 2),  # no sequence is longer
        ([99] * 3, Paging(16, 99), 3),
        ([99, None] * 3, Paging(16, 99, 16), 3),
        ([99] * 15 + [None] * 3, Paging(80, 99, 16), 3),
        ([99] * 29 + [None] * 5, Paging(96, 99, 16), 5),
        ([99, 99, *[None] * 5], Paging(16, 99, 48), 2),
    ],
)
def test_layers_share_no_memory(
    windows: list[int | None], paging: Paging, num_tensors: int
) -> None:
    layout = CacheLayout.of(windows, 16, max_model_len=1000)
    assert (layout.paging, layout.num_tensors) == (paging, num_tensors)
    for number, (block_size, _) in enumerate(paging.tables):
        tensors = [torch.zeros(2, 4 * paging.num_parts) for _ in range(num_tensors)]
        for cache, place in zip(layout.layers_of(tensors), layout.places, strict=True):
            if place.table == number:
                first = 2 * paging.num_parts  # of block 2
                cache[:, first : first + block_size // 16] += 1
        used = torch.stack(tensors).view(num_tensors, 2, 4, -1)
        assert used.max() == 1
        assert not used[:, :, [0, 1, 3]].any()


def test_a_sequence_with_windows_fits_into_less_memory() -> None:
    paging = Paging(80, window=20, window_block_size=16)
    limits = WorkerSettings(max_num_seqs=2)
    found = [blocks_that_fit(limits, size * MIB, MIB, paging, 400) for size in (8, 30, 99)]
    assert found == [8, 30, 2 * (5 + 25)]
    with pytest.raises(StartError, match=r"400 tokens takes 8 MiB"):
        blocks_that_fit(limits, 7 * MIB, MIB, paging, 400)
    with pytest.raises(StartError, match=r"^kv_blocks: 1; must be at least 2$"):
        blocks_that_fit(WorkerSettings(kv_blocks=1), 99 * MIB, MIB, paging, 400)
