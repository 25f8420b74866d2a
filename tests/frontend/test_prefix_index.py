"""A frontend's index of prefix caches, compared with the engines' own look-ups."""

from __future__ import annotations

import asyncio
import random
from array import array
from contextlib import ExitStack

import pytest

from frontend.engines.prefix_index import PrefixIndex
from scheduler_svc.block_watch import BlockWatch, watched
from scheduler_svc.core.blocks.block_manager import BlockManager
from scheduler_svc.core.sampling import SamplingParams
from scheduler_svc.core.sequence import Request, Sequence
from scheduler_svc.rpc.block_events import event_messages, snapshot_parts
from shared.paging import Paging
from shared.pb import scheduler_pb2 as pb

BLOCK_SIZE, NUM_BLOCKS = 4, 24


class Cache:
    """An engine's block manager with sequences that come and go, as its frontend is told."""

    def __init__(self, rng: random.Random) -> None:
        self.blocks = BlockManager(NUM_BLOCKS, Paging(BLOCK_SIZE))
        self._rng = rng
        self._running: list[Sequence] = []

    def live(self) -> None:
        """Computes a random prompt, or ends a sequence."""
        if self._running and self._rng.random() < 0.5:
            self.blocks.free(self._running.pop(self._rng.randrange(len(self._running))))
            return
        prompt, salt = random_prompt(self._rng)
        seq = sequence(prompt, salt)
        if self.blocks.allocate_prompt(seq):
            seq.begin_at(len(prompt))
            self.blocks.advance(seq)
            self._running.append(seq)

    def matched_blocks(self, prompt: list[int], salt: str) -> int:
        return self.blocks._prefix_to_use(sequence(prompt, salt)) // BLOCK_SIZE


def random_prompt(rng: random.Random) -> tuple[list[int], str]:
    """One of few, so that many begin alike."""
    shared = [7] * BLOCK_SIZE * rng.randrange(4)
    return [*shared, *(rng.randrange(2) for _ in range(rng.randrange(1, 20)))], rng.choice(
        ["", "s"]
    )


def sequence(prompt: list[int], salt: str) -> Sequence:
    return Sequence((0, 0), prompt, SamplingParams(max_tokens=1), Request(cache_salt=salt))


@pytest.mark.parametrize("seed", range(20))
async def test_the_index_finds_what_the_engines_find(seed: int) -> None:
    rng = random.Random(seed)
    print("seed", seed)
    index = PrefixIndex(BLOCK_SIZE)
    caches = [Cache(rng) for _ in range(3)]
    with ExitStack() as stack:
        watches: dict[int, BlockWatch] = {}
        for _ in range(300):
            number = rng.randrange(3)
            caches[number].live()
            if number not in watches:
                if rng.random() < 0.5:
                    continue  # what happens before it is watched is in the snapshot
                watches[number] = stack.enter_context(watched(caches[number].blocks))
                for message in snapshot_parts(caches[number].blocks.stored_blocks()):
                    await index.apply(number, message)
            for message in event_messages(watches[number].take()):
                await index.apply(number, message)
        for _ in range(100):
            prompt, salt = random_prompt(rng)
            found = index.matches(index.names_of(array("I", prompt), salt), range(3))
            assert found == {n: each.matched_blocks(prompt, salt) for n, each in enumerate(caches)}
        evicted = [each.blocks.num_evictions for each in caches]
        assert min(evicted) > 0  # the case that matters
    for number in range(3):
        index.forget(number)
    assert not index._holders
    assert not any(index._names.values())


def test_pending_blocks_count_until_they_are_removed() -> None:
    index = PrefixIndex(BLOCK_SIZE)
    names = index.names_of(array("I", range(9)), "")
    assert len(names) == 2
    index.add_pending(1, names)
    index.add_pending(1, names[:1])
    assert index.matches(names, [0, 1]) == {0: 0, 1: 2}
    index.remove_pending(1, names)
    assert index.matches(names, [0, 1]) == {0: 0, 1: 1}
    index.remove_pending(1, names[:1])
    assert index.matches(names, [0, 1]) == {0: 0, 1: 0}
    assert not index._pending


def chain(length: int) -> list[pb.StoredBlock]:
    """A prompt's blocks, the first one first."""
    blocks = [pb.StoredBlock(name=b"0", token_ids=array("I", range(BLOCK_SIZE)).tobytes())]
    for number in range(1, length):
        ids = array("I", range(number, number + BLOCK_SIZE)).tobytes()
        name, parent = str(number).encode(), blocks[-1].name
        blocks.append(pb.StoredBlock(name=name, parent=parent, token_ids=ids))
    return blocks


def told(*blocks: pb.StoredBlock) -> pb.BlockEvents:
    return pb.BlockEvents(events=[pb.BlockEvent(stored=block) for block in blocks])


async def test_a_long_chain_is_found_again_once_its_first_block_is_back() -> None:
    head, *tail = chain(3001)
    index, iterations = PrefixIndex(BLOCK_SIZE), 0

    def iterate() -> None:
        nonlocal iterations
        iterations += 1
        asyncio.get_running_loop().call_soon(iterate)

    prompt = array("I")
    for block in (head, *tail):
        prompt.frombytes(block.token_ids)
    prompt.append(0)
    names = index.names_of(prompt, "")
    await index.apply(0, told(*tail))
    assert index.matches(names, [0]) == {0: 0}
    iterate()
    await index.apply(0, told(head))
    assert index.matches(names, [0]) == {0: 3001}
    assert iterations >= 5  # others had their turns meanwhile
    index.forget(0)
    assert not index._holders
    assert not index._orphans


async def test_an_evicted_orphan_is_not_found_again() -> None:
    head, second, third = chain(3)
    index = PrefixIndex(BLOCK_SIZE)
    await index.apply(0, told(second, third))
    await index.apply(0, pb.BlockEvents(events=[pb.BlockEvent(removed=second.name)]))
    await index.apply(0, told(head))
    assert set(index._names[0]) == {head.name}
    await index.apply(0, told(second))
    assert set(index._names[0]) == {head.name, second.name, third.name}
