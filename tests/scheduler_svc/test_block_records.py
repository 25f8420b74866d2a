"""Records of the workers' cache, which a scheduler finds and continues."""

from __future__ import annotations

import resource
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from copy import copy
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis.stateful import invariant, rule

from scheduler_svc.block_records import MAX_SALT_BYTES, BlockRecords, RecordedCache
from scheduler_svc.block_watch import Removed, watched
from scheduler_svc.core.blocks.block_manager import BlockManager
from scheduler_svc.core.sampling import SamplingParams
from scheduler_svc.core.sequence import Request, Sequence
from shared.paging import Paging
from shared.pb import scheduler_pb2
from tests.fake_worker import FakeWorker, start_worker
from tests.scheduler_svc.stacks import Stack, running, settings_for
from tests.scheduler_svc.test_state_machines import MANY, BlockManagerMachine

BLOCK = 4
CACHE = RecordedCache(["one", "two"], 8, Paging(BLOCK), "model")
# Some layers have a window.
TWO_TABLES = replace(CACHE, num_blocks=16, paging=Paging(8, window=3, window_block_size=BLOCK))


def manager(records: BlockRecords, cache: RecordedCache = CACHE) -> BlockManager:
    """The block manager of another process, which shares the records' files."""
    return copy(records).block_manager(cache.num_blocks, cache.paging)


def begun(cache: RecordedCache = CACHE) -> BlockRecords:
    records = BlockRecords()
    records.begin(cache)
    return records


def sequence(tokens: list[int], salt: str = "") -> Sequence:
    return Sequence((0, 0), tokens, SamplingParams(max_tokens=9), Request(cache_salt=salt))


def compute(blocks: BlockManager, tokens: list[int], salt: str = "") -> None:
    seq = sequence(tokens, salt)
    assert blocks.allocate_prompt(seq)
    blocks.reserve(seq, len(tokens))
    seq.begin_at(len(tokens))
    blocks.advance(seq)
    blocks.free(seq)


def cached(blocks: BlockManager, tokens: list[int], salt: str = "") -> int:
    return blocks._prefix_to_use(sequence([*tokens, 0], salt))


@pytest.mark.parametrize("cache", [CACHE, TWO_TABLES], ids=["one table", "two"])
def test_a_successor_finds_the_prefixes_of_each_salt(cache: RecordedCache) -> None:
    records = begun(cache)
    first = manager(records, cache)
    compute(first, [1] * 8)
    compute(first, [1] * 8, "salt")
    second = manager(records, cache)
    second.check_integrity([])
    assert second.num_cached_blocks == first.num_cached_blocks
    assert second.stored_blocks() == first.stored_blocks()
    assert cached(second, [1] * 8) == cached(second, [1] * 8, "salt") == 8
    assert not cached(second, [1] * 8, "another")


def test_blocks_with_a_long_salt_are_not_recorded() -> None:
    records = begun()
    first = manager(records)
    longest = "é" * (MAX_SALT_BYTES // 2)
    compute(first, [1] * 8, longest + "e")
    compute(first, [1] * 8, longest + "ee")
    second = manager(records)
    second.check_integrity([])
    assert cached(second, [1] * 8, longest + "e") == 8
    assert not cached(second, [1] * 8, longest + "ee")


def test_prefixes_are_evicted_from_their_ends_and_the_latest_at_last() -> None:
    records = begun()
    first = manager(records)
    compute(first, [1] * 8)
    compute(first, [2] * 8)
    compute(first, [1] * 4 + [3] * 4)
    one, one_one, two, two_two, one_three = (each.name for each in first.stored_blocks())
    second = manager(records)
    with watched(second) as watch:
        assert second.allocate_prompt(sequence([9] * 8 * BLOCK))
        evicted = watch.take()
    assert evicted == [*map(Removed, (one_one, two_two, two, one_three, one))]


def test_a_half_written_record_is_not_found() -> None:
    records = begun()
    first = manager(records)
    (recorded,) = first.listeners
    assert isinstance(recorded, BlockRecords)
    compute(first, [1] * 4)
    compute(first, [2] * 4)
    memory, size = recorded._memory, recorded._size
    places = [first._block_of[each.name] * size for each in first.stored_blocks()]
    old, new = (memory[place : place + size] for place in places)
    for length in range(size):
        if new[:length] + old[length:] in (old, new):
            continue
        memory[places[1] : places[1] + size] = new[:length] + old[length:]
        second = manager(records)
        second.check_integrity([])
        assert (cached(second, [1] * 4), cached(second, [2] * 4)) == (4, 0)


def test_a_record_in_the_place_of_another_is_not_found() -> None:
    records = begun()
    first = manager(records)
    compute(first, [1] * 4)
    (recorded,) = first.listeners
    assert isinstance(recorded, BlockRecords)
    size = recorded._size
    recorded._memory[size : 2 * size] = recorded._memory[:size]
    assert manager(records)._block_of == first._block_of


def test_nothing_is_found_after_a_reset_nor_from_before_it() -> None:
    records = begun()
    first = manager(records)
    compute(first, [1] * 8)
    first.reset()
    assert not manager(records).stored_blocks()
    compute(first, [2] * 4)
    assert manager(records).stored_blocks() == first.stored_blocks()


def test_names_stay_when_another_cache_begins() -> None:
    records = begun()
    first = manager(records)
    compute(first, [1] * 8, "salt")
    another = RecordedCache(["three", "two"], 8, Paging(BLOCK), "model")
    (recorded,) = first.listeners
    assert isinstance(recorded, BlockRecords)
    recorded.begin(another)
    assert records.cache == another
    assert not manager(records).stored_blocks()
    first.reset()
    compute(first, [1] * 8, "salt")
    assert cached(manager(records), [1] * 8, "salt") == 8


@pytest.mark.parametrize(
    ("status", "kept"),
    [
        (-signal.SIGKILL, True),
        (-signal.SIGTERM, True),
        (0, True),
        (1, False),
        (-signal.SIGSEGV, False),
        (-signal.SIGABRT, False),
    ],
)
def test_what_may_be_damaged_is_forgotten(status: int, kept: bool) -> None:
    records = begun()
    compute(manager(records), [1] * 8)
    records.fork_ended(status)
    assert (records.cache == CACHE) == kept
    if not kept:
        records.begin(CACHE)
        assert not manager(records).stored_blocks()


@contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_limit_on_file_sizes_costs_the_records_only() -> None:
    records = BlockRecords()
    with file_size_limit(512):
        records.begin(CACHE)
        blocks = manager(records)
        compute(blocks, [1] * 8)
        blocks.reset()
        compute(blocks, [1] * 8)
    assert cached(blocks, [1] * 8) == 8
    assert records.cache is None


class SuccessionMachine(BlockManagerMachine):
    """Schedulers that die between calls. Each finds what was published and not taken since."""

    def __init__(self) -> None:
        super().__init__()
        self.records = BlockRecords()
        self.records.begin(RecordedCache(["one"], self.NUM_BLOCKS, Paging(2), "model"))
        self.take_over()

    def successor(self) -> BlockManager:
        return copy(self.records).block_manager(self.NUM_BLOCKS, Paging(2))

    @rule()
    def take_over(self) -> None:
        """The scheduler dies, and the next one begins."""
        self.watching.close()
        self.watching = ExitStack()
        self.blocks, self.live, self.sent = self.successor(), [], []
        self.watch = self.watching.enter_context(watched(self.blocks))
        self.watched = {each.name: each for each in self.blocks.stored_blocks()}

    @invariant()
    def a_successor_finds_what_is_published(self) -> None:
        found = self.successor()
        found.check_integrity([])
        assert found.stored_blocks() == self.blocks.stored_blocks()
        assert found._block_of == self.blocks._block_of
        order = [*found._cached]
        for place, block in enumerate(order):
            parent = found._contents[block].parent
            if parent in found._block_of:
                assert order.index(found._block_of[parent]) > place, "evicted before its end"


TestSuccession = SuccessionMachine.TestCase
TestSuccession.settings = MANY


class Workers:
    """Two ranks, and the schedulers that follow each other on them."""

    def __init__(self, tmp_path: Path, addresses: list[str], ranks: list[FakeWorker]) -> None:
        self.ranks = ranks
        self._records = BlockRecords()
        self._settings = settings_for(tmp_path, addresses)

    @asynccontextmanager
    async def scheduler(self) -> AsyncIterator[Stack]:
        async with running(self._settings, self._records) as stack:
            yield stack


@pytest.fixture
async def workers(tmp_path: Path) -> AsyncIterator[Workers]:
    ranks = [FakeWorker(rank=rank, world_size=2) for rank in range(2)]
    servers, addresses = zip(*[await start_worker(each) for each in ranks], strict=True)
    yield Workers(tmp_path, list(addresses), ranks)
    for server in servers:
        await server.stop(None)
    assert not any(each.violations for each in ranks)


PROMPT = [*range(20)]


async def answer(stack: Stack, prompt: list[int] = PROMPT) -> int:
    """Has the prompt continued; returns how many of its tokens were cached."""
    frontend = await stack.frontend()
    await frontend.complete(1, prompt, 6)
    frontend.close()
    return (await stack.load()).cached_prompt_tokens


async def published(stack: Stack) -> list[bytes]:
    """The names of the blocks that a new watcher is told about."""
    call = stack.stub.WatchBlocks(scheduler_pb2.WatchBlocksRequest(), wait_for_ready=True)
    message = await call.read()
    call.cancel()
    assert isinstance(message, scheduler_pb2.BlockEvents)
    return [event.stored.name for event in message.events]


async def test_a_scheduler_keeps_the_cache_of_the_one_before(workers: Workers) -> None:
    async with workers.scheduler() as stack:
        assert await answer(stack) == 0
        names = await published(stack)
        assert len(names) == 6
    async with workers.scheduler() as stack:
        assert await published(stack) == names
        assert await answer(stack) == 16
        failures = iter([True])  # one, after which the cache is kept again
        workers.ranks[1].fails = lambda _: next(failures, False)
        assert await answer(stack, [*range(30, 50)]) == 16
        assert workers.ranks[1].info.epoch == 3
        assert (await published(stack))[:6] == names
    async with workers.scheduler() as stack:
        assert await answer(stack) == 16


async def test_a_scheduler_begins_anew_if_one_rank_has_lost_its_cache(workers: Workers) -> None:
    async with workers.scheduler() as stack:
        await answer(stack)
    workers.ranks[1].lose_cache("new")
    for cached_tokens in (0, 16):
        async with workers.scheduler() as stack:
            assert bool(await published(stack)) == bool(cached_tokens)
            assert await answer(stack) == cached_tokens


@pytest.mark.parametrize(
    ("name", "value", "cached_tokens"),
    [("model_fingerprint", "another", 0), ("num_blocks", 32, 16)],
)
async def test_another_model_has_a_new_cache_and_a_kept_cache_its_size(
    workers: Workers, name: str, value: object, cached_tokens: int
) -> None:
    async with workers.scheduler() as stack:
        await answer(stack)
    for each in workers.ranks:
        setattr(each.info, name, value)
    async with workers.scheduler() as stack:
        assert await answer(stack) == cached_tokens
        assert (await stack.load()).blocks == 64
