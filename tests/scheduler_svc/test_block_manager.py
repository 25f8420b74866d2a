from __future__ import annotations

import pytest

from scheduler_svc.core.blocks.block_manager import BlockManager
from scheduler_svc.core.sampling import SamplingParams
from scheduler_svc.core.sequence import Request, Sequence
from shared.paging import Paging

BLOCK = 4


def make(number: int, tokens: list[int]) -> Sequence:
    return Sequence((0, number), tokens, SamplingParams(max_tokens=100))


def compute_all(blocks: BlockManager, seq: Sequence) -> None:
    seq.num_computed_tokens = seq.num_scheduled_tokens = seq.num_tokens
    blocks.advance(seq)


@pytest.mark.parametrize(("length", "shared"), [(8, 1), (9, 2), (12, 2), (13, 2), (5, 1), (4, 0)])
def test_only_whole_blocks_that_leave_a_token_are_shared(length: int, shared: int) -> None:
    blocks = BlockManager(16, Paging(BLOCK))
    first = make(1, list(range(9)))
    blocks.allocate_prompt(first)
    compute_all(blocks, first)
    second = make(2, list(range(length)))
    assert blocks.allocate_prompt(second)
    assert second.num_computed_tokens == shared * BLOCK


def test_only_names_under_a_salt_depend_on_a_key() -> None:
    """The others are equal in all processes, which a tier under the cache outlives."""

    def names(blocks: BlockManager, salt: str) -> list[bytes]:
        seq = Sequence((0, 1), range(8), SamplingParams(max_tokens=100), Request(cache_salt=salt))
        assert blocks.allocate_prompt(seq)
        compute_all(blocks, seq)
        return seq.blocks.names[0]

    blocks, other = BlockManager(16, Paging(BLOCK)), BlockManager(8, Paging(BLOCK))
    assert names(blocks, "") == names(other, "")
    assert names(blocks, "salt") == names(blocks, "salt")
    others = {*names(other, "salt"), *names(blocks, ""), *names(blocks, "another")}
    assert not {*names(blocks, "salt")} & others


def test_cached_blocks_are_not_counted_as_free_for_the_one_who_shares_them() -> None:
    blocks = BlockManager(3, Paging(BLOCK))
    first = make(1, list(range(9)))
    blocks.allocate_prompt(first)
    compute_all(blocks, first)
    blocks.free(first)
    assert blocks.num_free_blocks == 3
    assert not blocks.allocate_prompt(make(2, list(range(16))))  # needs 2 shared + 2 new of 3
    assert blocks.allocate_prompt(make(3, list(range(12))))


def test_the_least_recently_released_prefix_is_evicted_first_from_its_end() -> None:
    blocks = BlockManager(5, Paging(BLOCK))
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


def forked(blocks: BlockManager, parent: Sequence, number: int) -> Sequence:
    """A child of all the parent's tokens, of which the last is computed again."""
    child = make(number, parent.tokens.tolist())
    assert blocks.fork(parent, child)
    return child


@pytest.mark.parametrize("sent", [False, True])
@pytest.mark.parametrize("ended", [0, 1, 2])
def test_a_copy_of_a_block_whose_own_copy_is_lost_is_made_from_its_source(
    sent: bool, ended: int
) -> None:
    blocks = BlockManager(8, Paging(BLOCK))
    seqs = [make(0, list(range(6)))]
    blocks.allocate_prompt(seqs[0])
    seqs[0].begin_at(6)
    source = seqs[0].blocks.tables[0][1]
    for number in (1, 2, 3):
        seqs.append(forked(blocks, seqs[-1], number))
        if number < 3 or sent:
            blocks.take_copies()
    blocks.copy_again()
    for seq in seqs[:ended]:
        blocks.free(seq)
    seqs = seqs[ended:]
    blocks.check_integrity(seqs)
    copies = blocks.take_copies()
    assert copies == [(source, seq.blocks.tables[0][1]) for seq in seqs if seq.key.number]
    blocks.copied(copies)
    blocks.check_integrity(seqs)
    for seq in seqs:
        blocks.free(seq)
    assert blocks.num_free_blocks == 8
