"""The tier under the cache: what is saved, read and erased, and when."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from scheduler_svc.core.blocks.cache_tier import CacheTier
from scheduler_svc.core.sampling import SamplingParams
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import Request, Sequence, Status
from scheduler_svc.core.step import StepTiming
from scheduler_svc.core.swaps import TierContents, Transfer, TransferAnswer, TransferKind
from tests.scheduler_svc.schedulers import answered, make_scheduler, planned, sample

SAVE, LOAD, ERASE = TransferKind
PROMPT = [*range(40)]  # ten blocks


class Directory:
    """Makes transfers at once, with the contents of blocks left out."""

    def __init__(self, scheduler: Scheduler, capacity: int = 100) -> None:
        self.names: dict[bytes, None] = {}
        self.made: list[Transfer] = []
        self.capacity = capacity
        self.serve(scheduler)

    def serve(self, scheduler: Scheduler) -> None:
        """Serves a scheduler that has just started."""
        self._scheduler = scheduler
        scheduler.swaps.open(TierContents([*self.names], self.capacity))

    def make_all(self, works: Callable[[bytes], bool] = lambda _: True) -> None:
        """Makes transfers until there are none."""
        while transfers := self._scheduler.swaps.take():
            for transfer in transfers:
                self.make(transfer, works)

    def make(self, transfer: Transfer, works: Callable[[bytes], bool] = lambda _: True) -> None:
        self.made.append(transfer)
        done = [works(name) for name in transfer.names]
        for name, is_done in zip(transfer.names, done, strict=True):
            if transfer.kind is SAVE and is_done:
                self.names[name] = None
            elif transfer.kind is LOAD:
                assert name in self.names
            elif transfer.kind is ERASE:
                self.names.pop(name, None)
        assert len(self.names) <= self.capacity
        self._scheduler.swaps.apply(TransferAnswer(transfer.number, done, 1e-6, self.capacity))
        self._scheduler.check_integrity()

    def count(self, kind: TransferKind) -> int:
        """How many blocks were part of such transfers."""
        return sum(len(each.names) for each in self.made if each.kind is kind)


def add(
    scheduler: Scheduler, number: int, prompt: list[int], max_tokens: int = 2, **fields: object
) -> Sequence:
    seq = Sequence((0, number), prompt, SamplingParams(max_tokens), Request(**fields))
    assert scheduler.add(seq) is None
    return seq


def run(scheduler: Scheduler, directory: Directory | None = None) -> None:
    """Runs all sequences to their ends."""
    while scheduler.open_sequences():
        answered(scheduler)
        if directory:
            directory.make_all()


def saved(scheduler: Scheduler) -> Directory:
    """A directory to which a scheduler has saved the prompt's ten blocks."""
    directory = Directory(scheduler)
    add(scheduler, 1, PROMPT)
    run(scheduler, directory)
    return directory


@pytest.fixture
def scheduler() -> Scheduler:
    return make_scheduler()


def test_a_new_scheduler_finds_what_the_last_one_saved(scheduler: Scheduler) -> None:
    directory = saved(scheduler)
    assert len(directory.names) == 10

    after = make_scheduler()
    directory.serve(after)
    seq = add(after, 2, [*PROMPT, 7])
    assert after.schedule() is None
    assert seq.status is Status.SWAPPED
    (load,) = after.swaps.take()
    assert (load.kind, len(load.names)) == (LOAD, 10)
    assert after.swaps.take() == []
    directory.make(load)
    row = planned(after).rows[0]
    assert (row.start, row.num_tokens) == (40, 1)
    assert seq.started is not None
    assert seq.started.num_cached_tokens == 40
    assert after.stats.loaded_blocks == 10


def test_only_the_part_that_the_cache_lacks_is_read(scheduler: Scheduler) -> None:
    directory = saved(scheduler)
    after = make_scheduler()
    add(after, 2, PROMPT[:16])
    run(after)
    directory.serve(after)
    add(after, 3, [*PROMPT, 7])
    assert after.schedule() is None
    (load,) = after.swaps.take()
    assert len(load.names) == 6


def test_a_preempted_sequence_is_read_and_not_computed_again() -> None:
    scheduler = make_scheduler(num_blocks=20)
    directory = Directory(scheduler)
    for number in (1, 2):
        add(scheduler, number, [number, *PROMPT[1:24]], max_tokens=30)
    run(scheduler, directory)
    assert scheduler.stats.preemptions
    assert scheduler.stats.loaded_blocks
    # 24 + 29 tokens each, and for each preemption the last, partly filled block.
    again = scheduler.stats.step_tokens - 2 * 53
    assert again <= 4 * scheduler.stats.preemptions


@pytest.mark.parametrize("ends", ["aborted", "lost"])
def test_a_sequence_that_is_being_read_may_end_or_lose_its_workers(
    scheduler: Scheduler, ends: str
) -> None:
    """Its blocks are free only when nothing writes to them any more."""
    directory = saved(scheduler)
    after = make_scheduler(num_blocks=12)
    directory.serve(after)
    seq = add(after, 2, [*PROMPT, 7])
    assert after.schedule() is None
    (load,) = after.swaps.take()
    if ends == "aborted":
        after.abort(seq.key)
        assert after.blocks.num_free_blocks == 1
        directory.make(load)
        assert after.blocks.num_free_blocks == 12
        return
    after.swaps.lost()
    after.rewind_all()
    after.check_integrity()
    assert seq.status is Status.WAITING
    assert planned(after).rows[0].start == 0  # before the tier is known again
    assert after.swaps.take() == []


def test_a_block_that_cannot_be_read_is_computed(scheduler: Scheduler) -> None:
    directory = saved(scheduler)
    after = make_scheduler()
    directory.serve(after)
    seq = add(after, 2, [*PROMPT, 7])
    assert after.schedule() is None
    (load,) = after.swaps.take()
    damaged = load.names[5]
    directory.make(load, lambda name: name != damaged)
    assert seq.status is Status.WAITING
    assert planned(after).rows[0].start == 20  # the blocks before it stay
    directory.make_all()
    assert damaged not in directory.names
    assert after.stats.failed_loads == 1


def test_nothing_with_a_salt_is_saved(scheduler: Scheduler) -> None:
    directory = Directory(scheduler)
    add(scheduler, 1, PROMPT, cache_salt="a tenant")
    run(scheduler, directory)
    assert not directory.made


def test_a_request_that_may_not_be_stored_is_not_saved_and_erased(scheduler: Scheduler) -> None:
    directory = Directory(scheduler)
    add(scheduler, 1, PROMPT, may_store=False)
    run(scheduler, directory)
    assert not directory.made
    add(scheduler, 2, PROMPT)
    add(scheduler, 3, [9, *PROMPT])
    run(scheduler, directory)
    assert len(directory.names) == 20
    add(scheduler, 4, PROMPT, may_store=False)
    run(scheduler, directory)
    directory.make_all()
    assert len(directory.names) == 10


def test_the_blocks_used_least_recently_leave_from_the_ends_of_their_prefixes(
    scheduler: Scheduler,
) -> None:
    directory = Directory(scheduler, capacity=25)
    for number in range(3):
        add(scheduler, number, [number, *PROMPT[1:]])
        run(scheduler, directory)
        if number == 1:  # the first one is used again
            add(scheduler, 10, [0, *PROMPT[1:]])
            run(scheduler, directory)
    assert len(directory.names) == 25
    found = []
    for number in range(3):
        after = make_scheduler()
        directory.serve(after)
        seq = add(after, number, [number, *PROMPT[1:], 5])
        after.schedule()
        directory.make_all()
        found.append(planned(after).rows[0].start // 4 if seq.status is Status.RUNNING else 0)
    assert found == [10, 5, 10]


def test_what_is_not_read_faster_is_computed(scheduler: Scheduler) -> None:
    """A slow tier is tried again later."""
    directory = saved(scheduler)
    after = make_scheduler()
    directory.serve(after)
    add(after, 2, [9] * 8, max_tokens=1)
    step = planned(after)
    after.apply(step, sample(step))
    after.step_times.step_answered(step, StepTiming(8e-3, 0.0, 1.0))  # 1 ms per token
    add(after, 3, [*PROMPT, 7], max_tokens=1)
    assert after.schedule() is None
    (load,) = [each for each in after.swaps.take() if each.kind is LOAD]
    after.swaps.apply(TransferAnswer(load.number, [True] * 10, 1.0, 100))
    run(after)
    waits = 0
    while True:  # other prompts, none of which the cache has
        waits += 1
        fresh = make_scheduler()
        fresh.swaps.open(TierContents([*directory.names], 100))
        fresh.blocks.tier._token_read_s = after.blocks.tier._token_read_s
        fresh.swaps._tier.times = after.step_times
        add(fresh, 4, [*PROMPT, 7], max_tokens=1)
        if fresh.schedule() is None:
            break
        after.blocks.tier._token_read_s = fresh.blocks.tier._token_read_s
    assert 20 < waits < 60


def test_more_than_can_be_saved_is_offered_again_in_order() -> None:
    """No block is saved without the one before it."""
    tier = CacheTier()
    tier.open([], 100)
    names = [bytes([i]) * 16 for i in range(6)]
    parents = [None, *names]
    for name, parent in zip(names, parents, strict=False):
        tier.offer(name, parent)
    tier.withdraw(names[2])  # evicted before its turn
    assert tier.next_saves(8) == names[:2]
    tier.saved(names[:2], [True, True])
    for name, parent in zip(names, parents, strict=False):
        tier.offer(name, parent)
    assert tier.next_saves(3) == names[2:5]


def test_a_tier_that_ends_leaves_no_sequence_behind(scheduler: Scheduler) -> None:
    directory = saved(scheduler)
    after = make_scheduler()
    directory.serve(after)
    add(after, 2, [*PROMPT, 7])
    assert after.schedule() is None
    after.swaps.open(TierContents([], 0))
    assert after.swaps.take() == []
    assert planned(after).rows[0].start == 0


def test_a_save_that_was_not_answered_is_not_trusted(scheduler: Scheduler) -> None:
    directory = Directory(scheduler)
    add(scheduler, 1, PROMPT)
    while scheduler.open_sequences():
        answered(scheduler)
    (save,) = scheduler.swaps.take()
    scheduler.swaps.lost()
    scheduler.rewind_all()
    scheduler.check_integrity()
    directory.names |= dict.fromkeys(save.names)  # of a file nobody knows what it holds
    directory.serve(scheduler)
    scheduler.blocks.reset()
    add(scheduler, 2, [*PROMPT, 7])
    assert planned(scheduler).rows[0].start == 0
    (erasure,) = scheduler.swaps.take()
    assert (erasure.kind, set(erasure.names)) == (ERASE, set(save.names))


def test_a_prefix_that_is_being_read_is_read_once(scheduler: Scheduler) -> None:
    directory = saved(scheduler)
    after = make_scheduler()
    directory.serve(after)
    for number in (2, 3, 4):
        add(after, number, [*PROMPT, number])
    assert after.schedule() is None
    directory.made.clear()
    directory.make_all()
    assert directory.count(LOAD) == 10
    assert [row.start for row in planned(after).rows] == [40, 40, 40]


def test_an_aborted_read_stops(scheduler: Scheduler) -> None:
    directory = Directory(scheduler)
    add(scheduler, 1, PROMPT * 3, max_tokens=1)
    run(scheduler, directory)
    after = make_scheduler()
    directory.serve(after)
    seq = add(after, 2, [*PROMPT * 3, 7], max_tokens=1)
    assert after.schedule() is None
    (load,) = after.swaps.take()
    assert len(load.names) == 16
    after.abort(seq.key)
    directory.make(load)
    assert after.swaps.take() == []
    assert after.swaps.num_swapped == 0
    assert after.blocks.num_free_blocks == after.blocks.num_blocks


def test_a_request_that_may_not_be_stored_erases_though_the_tier_is_closed(
    scheduler: Scheduler,
) -> None:
    directory = saved(scheduler)
    assert len(directory.names) == 10
    scheduler.swaps.lost()
    scheduler.rewind_all()
    add(scheduler, 2, PROMPT, may_store=False)
    run(scheduler)
    directory.serve(scheduler)
    directory.make_all()
    assert not directory.names
