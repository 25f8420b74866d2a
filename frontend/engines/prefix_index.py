"""An index of the prefixes that each engine's cache holds, built from the caches' events.

As in an engine (`BlockManager`), a block's name depends on its tokens and the name of the block
before it. The first block's name depends on its tokens and the cache salt. Each engine makes names
with a secret of its own. Here a block has one name, a hash under this process's random seed,
whichever engines hold it. If two prefixes shared a name, a request might go to an engine without
its prefix, and that engine would compute the prefix.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable

from shared.pb import scheduler_pb2 as pb

Name = int
_ATTACHED_AT_ONCE = 512  # orphans, in one iteration of the event loop


class _Orphans:
    """Blocks whose parent an engine does not hold, by the parent's name and their own."""

    def __init__(self) -> None:
        self._of: dict[bytes, dict[bytes, pb.StoredBlock]] = {}
        self._parents: dict[bytes, bytes] = {}

    def add(self, block: pb.StoredBlock) -> None:
        self._parents[block.name] = block.parent
        self._of.setdefault(block.parent, {})[block.name] = block

    def remove(self, name: bytes) -> None:
        """Forgets the block of this name, if it is an orphan."""
        parent = self._parents.pop(name, None)
        if parent is not None:
            siblings = self._of[parent]
            del siblings[name]
            if not siblings:
                del self._of[parent]

    def take(self, parent: bytes) -> Iterable[pb.StoredBlock]:
        """Removes and returns the orphans of one parent."""
        children = self._of.pop(parent, {})
        for name in children:
            del self._parents[name]
        return children.values()


class PrefixIndex:
    """The published blocks of several engines, numbered from 0, with blocks of one size."""

    def __init__(self, block_size: int) -> None:
        self._bytes_per_block = 4 * block_size
        self._holders: dict[Name, int] = {}  # bit n: engine n holds the block
        self._pending: dict[Name, Counter[int]] = {}
        # By engine: names here by the engine's names.
        self._names: dict[int, dict[bytes, Name]] = {}
        # By engine; no request finds these blocks until their parent is back.
        self._orphans: defaultdict[int, _Orphans] = defaultdict(_Orphans)

    async def apply(self, engine: int, message: pb.BlockEvents) -> None:
        """Applies an engine's next message. Pass every message, in order. Long work gives the event
        loop turns in between."""
        if message.HasField("snapshot") and message.snapshot.index == 0:
            self.forget(engine)
        for event in message.events:
            if event.HasField("stored"):
                await self._store(engine, event.stored)
            elif event.HasField("removed"):
                self._remove(engine, event.removed)
            else:
                self.forget(engine)

    def forget(self, engine: int) -> None:
        """Removes an engine's blocks, because it is gone or will send all its blocks again."""
        for name in self._names.pop(engine, {}).values():
            self._release(name, engine)
        self._orphans.pop(engine, None)

    def names_of(self, token_ids: array[int], cache_salt: str) -> list[Name]:
        """The names of a prompt's full blocks. The last token is always computed, so it is never
        part of a block."""
        data = token_ids[:-1].tobytes()
        size, name, names = self._bytes_per_block, _root(cache_salt), []
        for end in range(size, len(data) + 1, size):
            name = hash((name, data[end - size : end]))
            names.append(name)
        return names

    def matches(self, names: Iterable[Name], engines: Iterable[int]) -> dict[int, int]:
        """The number of leading blocks that each of `engines` holds or is about to compute."""
        found = dict.fromkeys(engines, 0)
        left, depth = sum(1 << engine for engine in found), 0
        for name in names:
            holders = self._holders.get(name, 0)
            if name in self._pending:
                for engine in self._pending[name]:
                    holders |= 1 << engine
            if left & ~holders:  # the matches of these engines end here
                found.update((e, depth) for e in found if left & ~holders & 1 << e)
                left &= holders
                if not left:
                    break
            depth += 1
        found.update((engine, depth) for engine in found if left & 1 << engine)
        return found

    def add_pending(self, engine: int, names: Iterable[Name]) -> None:
        """Counts blocks that an engine is about to compute as held by it, until `remove_pending`.
        Requests that follow at once with this prompt then go to this engine."""
        for name in names:
            self._pending.setdefault(name, Counter())[engine] += 1

    def remove_pending(self, engine: int, names: Iterable[Name]) -> None:
        for name in names:
            pending = self._pending[name]
            pending[engine] -= 1
            if not pending[engine]:
                del pending[engine]
                if not pending:
                    del self._pending[name]

    async def _store(self, engine: int, block: pb.StoredBlock) -> None:
        names = self._names.setdefault(engine, {})
        orphans = self._orphans[engine]
        if block.parent and block.parent not in names:
            orphans.add(block)
            return
        attached = 0
        found = [block]
        while found:
            block = found.pop()
            before = names[block.parent] if block.parent else _root(block.cache_salt)
            name = names[block.name] = hash((before, block.token_ids))
            self._holders[name] = self._holders.get(name, 0) | 1 << engine
            found += orphans.take(block.name)
            attached += 1
            if attached % _ATTACHED_AT_ONCE == 0:
                await asyncio.sleep(0)

    def _remove(self, engine: int, their_name: bytes) -> None:
        if orphans := self._orphans.get(engine):
            orphans.remove(their_name)
        name = self._names.get(engine, {}).pop(their_name, None)
        if name is not None:
            self._release(name, engine)

    def _release(self, name: Name, engine: int) -> None:
        holders = self._holders[name] & ~(1 << engine)
        if holders:
            self._holders[name] = holders
        else:
            del self._holders[name]


def _root(cache_salt: str) -> Name:
    return hash(("cache_salt", cache_salt))
