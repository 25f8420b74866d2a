"""Blocks out of a window are freed, and prompts get theirs chunk by chunk."""

from __future__ import annotations

import pytest

from scheduler_svc.core.blocks.block_manager import BlockManager
from scheduler_svc.core.sampling import SamplingParams
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import Sequence
from shared.paging import Paging
from tests.scheduler_svc.schedulers import answered, make, make_scheduler, planned, run

ALL = Paging(4, window=8)  # all layers have a window
TWO = Paging(20, window=8, window_block_size=4)


@pytest.mark.parametrize(
    ("paging", "num_tokens", "num_blocks"),
    [
        (Paging(4), 100, 25),
        (ALL, 5, 2),
        (ALL, 100, 3),
        (TWO, 5, 1 + 2),
        (TWO, 100, 5 + 3),
        (Paging(4, window=1), 100, 2),
        (Paging(4, window=9), 100, 3),
        (Paging(4, window=10), 100, 4),
    ],
)
def test_a_sequence_holds_the_blocks_of_a_window(
    paging: Paging, num_tokens: int, num_blocks: int
) -> None:
    """It gets as many as it needs, and gives back those that no later token sees."""
    assert sum(kind.blocks_for(num_tokens) for kind in paging.tables) == num_blocks
    blocks = BlockManager(num_blocks, paging)
    seq = Sequence((0, 1), range(num_tokens), SamplingParams(max_tokens=1))
    assert blocks.allocate_prompt(seq)
    while seq.num_computed_tokens < num_tokens:
        room = blocks.reserve(seq, seq.num_unscheduled_tokens)
        assert room > 0
        seq.begin_at(seq.num_computed_tokens + room)
        blocks.advance(seq)
        blocks.check_integrity([seq])


@pytest.mark.parametrize("paging", [ALL, TWO])
def test_a_cache_has_room_for_more_sequences_than_without_windows(paging: Paging) -> None:
    scheduler = make_scheduler(40, paging=paging, max_model_len=128)
    for number in range(4):
        scheduler.add(make(number, [number] * 100, max_tokens=20))
    run(scheduler, ahead=1)
    assert scheduler.stats.preemptions == 0


def test_a_penalty_keeps_all_blocks_of_the_only_table() -> None:
    for paging, room in ((ALL, 25), (TWO, 8)):
        blocks = BlockManager(room, paging)
        params = SamplingParams(max_tokens=1, frequency_penalty=0.5)
        seq = Sequence((0, 1), range(100), params)
        assert blocks.allocate_prompt(seq)
        assert not BlockManager(room - 1, paging).allocate_prompt(
            Sequence((0, 1), range(100), params)
        )


def test_short_prompts_do_not_overtake_one_that_keeps_its_blocks_for_ever() -> None:
    scheduler = make_scheduler(90, paging=ALL, max_model_len=360, max_num_seqs=32)
    params = SamplingParams(max_tokens=1, frequency_penalty=0.5)
    big = Sequence((0, 0), [1] * 340, params)
    for number in range(1, 300):
        if number % 3 == 1:
            scheduler.add(make(number, [number] * 12, max_tokens=20))
        if number == 20:
            scheduler.add(big)
        answered(scheduler)
    assert big.started is not None


def cached(scheduler: Scheduler, number: int, prompt: list[int]) -> int:
    """The tokens of a prompt that come from the cache."""
    seq = make(number, prompt)
    scheduler.add(seq)
    run(scheduler)
    assert seq.started is not None
    return seq.started.num_cached_tokens


@pytest.mark.parametrize(("paging", "found"), [(ALL, 96), (TWO, 80)])
def test_a_prefix_is_found_by_its_last_window(paging: Paging, found: int) -> None:
    scheduler = make_scheduler(100, paging=paging, max_model_len=128)
    assert cached(scheduler, 1, [1] * 99) == 0
    assert cached(scheduler, 2, [1] * 97 + [2] * 10) == found
    # Evicts the blocks out of the window, which were released first.
    num_empty = scheduler.blocks.num_free_blocks - scheduler.blocks.num_cached_blocks
    for block in [scheduler.blocks._take() for _ in range(num_empty + 16)]:
        scheduler.blocks._release(block)
    assert cached(scheduler, 3, [1] * 97 + [3] * 10) == found
    assert cached(scheduler, 4, [1] * 50) == 0


def test_a_prefix_with_gaps_is_published_again() -> None:
    """Old blocks, which are evicted first, do not keep the new ones nameless."""
    blocks = BlockManager(70, TWO)

    def compute() -> tuple[Sequence, int]:
        seq = Sequence((0, 1), [1] * 81, SamplingParams(max_tokens=1))
        assert blocks.allocate_prompt(seq)
        num_cached = seq.num_computed_tokens
        blocks.reserve(seq, 81 - num_cached)
        seq.begin_at(81)
        blocks.advance(seq)
        return seq, num_cached

    first, _ = compute()
    blocks.free(first)
    gap = blocks._block_of[first.blocks.names[1][18]]
    del blocks._cached[gap]
    blocks._forget(gap)
    blocks._free.append(gap)
    second, num_cached = compute()
    assert num_cached < 80
    while blocks.num_free_blocks:
        blocks._take()
    blocks.free(second)
    assert compute()[1] == 80


def test_prompts_that_all_wait_for_a_block_do_not_wait_for_ever() -> None:
    scheduler = make_scheduler(6, paging=ALL, max_model_len=20)
    seqs = [make(number, [number] * 19, max_tokens=1) for number in range(3)]
    for seq in seqs:
        scheduler.add(seq)
        assert scheduler._open.admit(seq, 0.0)
        assert scheduler.blocks.reserve(seq, 4) == 4
    for seq in seqs:
        assert scheduler.blocks.reserve(seq, 8) == 8
        seq.begin_at(8)
        scheduler.blocks.advance(seq)
    assert scheduler.blocks.num_free_blocks == 0
    step = planned(scheduler)
    assert [row.seq for row in step.rows] == seqs[:2]
    assert scheduler.stats.preemptions == 1


def test_blocks_are_not_freed_before_their_step_is_answered() -> None:
    scheduler = make_scheduler(40, paging=ALL, max_num_batched_tokens=16)
    seq = make(1, [1] * 60)
    scheduler.add(seq)
    answered(scheduler)
    planned(scheduler)
    assert (seq.num_scheduled_tokens, seq.blocks.first) == (32, 2)
    assert seq.blocks.capacity == 32
