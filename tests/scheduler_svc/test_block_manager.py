from __future__ import annotations

import random

import pytest

from scheduler_svc.core.block_manager import BlockManager
from scheduler_svc.core.sampling import SamplingParams
from scheduler_svc.core.sequence import Request, Sequence

BLOCK = 4


def make(number: int, tokens: list[int]) -> Sequence:
    return Sequence((0, number), tokens, SamplingParams(max_tokens=100))


def compute_all(blocks: BlockManager, seq: Sequence) -> None:
    seq.num_computed_tokens = seq.num_scheduled_tokens = seq.num_tokens
    blocks.publish(seq)


def test_a_full_prefix_hit_leaves_a_token_to_compute() -> None:
    blocks = BlockManager(8, BLOCK)
    first, second = make(1, list(range(8))), make(2, list(range(8)))
    assert blocks.allocate_prompt(first)
    compute_all(blocks, first)
    assert blocks.allocate_prompt(second)
    assert second.num_computed_tokens == 4  # two blocks match, but the second is recomputed
    assert second.block_table[0] == first.block_table[0]
    assert second.block_table[1] != first.block_table[1]
    blocks.check_integrity([first, second])


@pytest.mark.parametrize(("length", "shared"), [(8, 1), (9, 2), (12, 2), (13, 2), (5, 1), (4, 0)])
def test_only_whole_blocks_that_leave_a_token_are_shared(length: int, shared: int) -> None:
    blocks = BlockManager(16, BLOCK)
    first = make(1, list(range(9)))
    blocks.allocate_prompt(first)
    compute_all(blocks, first)
    second = make(2, list(range(length)))
    assert blocks.allocate_prompt(second)
    assert second.num_computed_tokens == shared * BLOCK


def test_a_block_is_shared_only_after_it_was_published() -> None:
    blocks = BlockManager(8, BLOCK)
    first, second = make(1, list(range(9))), make(2, list(range(9)))
    blocks.allocate_prompt(first)
    blocks.allocate_prompt(second)
    assert second.num_computed_tokens == 0


def test_the_same_block_after_another_prefix_is_another_block() -> None:
    blocks = BlockManager(8, BLOCK)
    first, second = make(1, [1] * 4 + [2] * 4 + [0]), make(2, [3] * 4 + [2] * 4 + [0])
    blocks.allocate_prompt(first)
    compute_all(blocks, first)
    blocks.allocate_prompt(second)
    assert second.num_computed_tokens == 0


def test_names_under_a_salt_depend_on_a_key_and_not_only_on_the_seed() -> None:
    """Of the hash without a key, inputs are known that collide under any seed."""

    def names(blocks: BlockManager, salt: str) -> list[bytes]:
        seq = Sequence((0, 1), range(8), SamplingParams(max_tokens=100), Request(cache_salt=salt))
        assert blocks.allocate_prompt(seq)
        compute_all(blocks, seq)
        return seq.block_hashes

    blocks, other = BlockManager(8, BLOCK), BlockManager(8, BLOCK)
    other._seed = blocks._seed
    assert names(blocks, "") == names(other, "")
    assert names(blocks, "salt") == names(blocks, "salt")
    assert not {*names(blocks, "salt")} & {*names(other, "salt"), *names(blocks, "")}


@pytest.mark.parametrize("computed", [3, 4, 5, 7, 8])
def test_append_slot_takes_a_block_only_at_the_boundary(computed: int) -> None:
    blocks = BlockManager(8, BLOCK)
    seq = make(1, list(range(computed)))
    blocks.allocate_prompt(seq)
    compute_all(blocks, seq)
    before = len(seq.block_table)
    assert blocks.append_slot(seq)
    assert len(seq.block_table) == before + (computed % BLOCK == 0)
    assert len(seq.block_table) == blocks.blocks_for(computed + 1)


def test_too_few_blocks_change_nothing() -> None:
    blocks = BlockManager(3, BLOCK)
    first = make(1, list(range(8)))
    assert blocks.allocate_prompt(first)
    second = make(2, list(range(100, 108)))
    assert not blocks.allocate_prompt(second)
    assert not second.block_table
    blocks.check_integrity([first])
    assert blocks.append_slot(first)
    assert blocks.num_free_blocks == 1  # positions 0 to 7 fill two blocks, none computed yet


def test_cached_blocks_are_not_counted_as_free_for_the_one_who_shares_them() -> None:
    blocks = BlockManager(3, BLOCK)
    first = make(1, list(range(9)))
    blocks.allocate_prompt(first)
    compute_all(blocks, first)
    blocks.free(first)
    assert blocks.num_free_blocks == 3
    assert not blocks.allocate_prompt(make(2, list(range(16))))  # needs 2 shared + 2 new of 3
    assert blocks.allocate_prompt(make(3, list(range(12))))


def test_the_least_recently_released_prefix_is_evicted_first_from_its_end() -> None:
    blocks = BlockManager(5, BLOCK)
    old, new, other = make(1, [1] * 8), make(2, [2] * 8), make(3, [3])
    for seq in (old, new, other):
        blocks.allocate_prompt(seq)
        compute_all(blocks, seq)
    blocks.free(old)
    blocks.free(new)
    assert blocks.allocate_prompt(make(4, [4] * 4))  # takes the end of `old`
    blocks.free(other)
    probe_new, probe_old = make(5, [2] * 9), make(6, [1] * 9)
    assert blocks.allocate_prompt(probe_new)
    assert probe_new.num_computed_tokens == 8
    blocks.free(probe_new)
    assert blocks.allocate_prompt(probe_old)
    assert probe_old.num_computed_tokens == 4


def test_random_operations_keep_integrity(seed: int) -> None:
    rng = random.Random(seed)
    blocks = BlockManager(24, BLOCK)
    live: list[Sequence] = []
    for number in range(3000):
        action = rng.random()
        if action < 0.4:
            seq = make(number, [rng.randrange(2) for _ in range(rng.randrange(1, 40))])
            if blocks.allocate_prompt(seq):
                assert seq.num_computed_tokens < seq.num_tokens
                live.append(seq)
        elif action < 0.7 and live:
            seq = rng.choice(live)
            computed = rng.randint(seq.num_computed_tokens, seq.num_tokens)
            seq.num_computed_tokens = seq.num_scheduled_tokens = computed
            blocks.publish(seq)
            if computed == seq.num_tokens and blocks.append_slot(seq):
                seq.tokens.append(rng.randrange(2))
        elif live:
            blocks.free(live.pop(rng.randrange(len(live))))
        blocks.check_integrity(live)
    for seq in live:
        blocks.free(seq)
    blocks.check_integrity([])
    assert blocks.num_free_blocks == 24
