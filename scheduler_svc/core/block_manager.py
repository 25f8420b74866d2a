"""Paged KV cache bookkeeping: which sequences hold a block, and which free blocks hold a prefix.

A block is in one of three places:

    free ───allocate───▶ in use (reference count > 0) ──last release──▶ free, if it has no name
                            ▲                                      └──▶ cached, if published
    cached ──match_prefix───┤
    cached ──allocate───────┘ the least recently released first, when no free block is left; its
                              name is forgotten

Prefix caching follows vLLM's automatic prefix caching. A full block's name is a hash of its tokens
chained with the name of the block before it. A name therefore stands for the whole prefix. The
first block is chained with the sequence's cache salt, so that only requests with that salt share
its prefixes. Names with a salt are BLAKE2b hashes (RFC 7693) with a random key, which nobody can
forge. For XXH3, input pairs are known that collide under any seed (issue 1127 of Cyan4973/xxHash).

A fork shares the full blocks of the tokens that it has in common with its parent. The next step
copies a partly filled block (copy on write) before it writes anything. Steps run in order, so that
a step in flight may write what a copy reads. The source of a copy stays in use, even if no sequence
holds it, until the step that copies is answered. A lost step's copies are made by the next step.
"""

from __future__ import annotations

import hashlib
import secrets
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import NamedTuple
from weakref import WeakKeyDictionary

import xxhash

from scheduler_svc.core.cache_listener import CacheListener, StoredBlock
from scheduler_svc.core.sequence import Sequence

_NAME_BYTES = 16


class Naming(NamedTuple):
    """The numbers on which the names of blocks depend, besides tokens and salts."""

    seed: int  # of names without a salt, 64 bits
    key: bytes  # of names with a salt

    @classmethod
    def new(cls) -> Naming:
        return cls(secrets.randbits(64), secrets.token_bytes(32))


class BlockManager:
    """Blocks 0 to `num_blocks - 1` of `block_size` tokens each. Every operation takes time
    proportional to the blocks it hands out or takes back, never to the size of the cache.

    Args:
        naming, published: those of an earlier manager of this cache. The published blocks, in the
            order in which they were published, are cached.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        naming: Naming | None = None,
        published: Seq[tuple[int, StoredBlock]] = (),
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_evictions = 0  # of cached blocks, to make room for new content
        self.listeners: list[CacheListener] = []
        self._seed, key = naming or Naming.new()
        # Copied for each hash: making a new object takes half as long again.
        self._keyed = hashlib.blake2b(key=key, digest_size=_NAME_BYTES)
        self._empty()
        self._adopt(published)

    def reset(self) -> None:
        """Empties every block and forgets its holders. Call it when the cache has been lost."""
        self._empty()
        for listener in self.listeners:
            listener.cleared()

    def _empty(self) -> None:
        self._ref_counts = array("i", bytes(4 * self.num_blocks))
        self._free = deque(range(self.num_blocks))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently released first
        self._block_of: dict[bytes, int] = {}  # name -> block, for published blocks
        self._name_of: dict[int, bytes] = {}
        self._contents: dict[bytes, StoredBlock] = {}  # by name
        self._copies: dict[int, int] = {}  # to block -> from block; both in use
        self._copying: dict[int, int] = {}  # those of the steps in flight
        # The free blocks needed by each waiting sequence that found too few.
        self._needed: WeakKeyDictionary[Sequence, int] = WeakKeyDictionary()

    def _adopt(self, published: Seq[tuple[int, StoredBlock]]) -> None:
        """Caches the blocks that an earlier manager published.

        A block is evicted after the blocks that continue it. Otherwise, prefixes are evicted in the
        order in which their last blocks were published.
        """
        for block, stored in published:
            self._block_of[stored.name], self._name_of[block] = block, stored.name
            self._contents[stored.name] = stored
        kept: dict[int, None] = {}  # in reverse order of eviction
        for _, stored in reversed(published):
            prefix: list[int] = []
            name: bytes | None = stored.name
            while name in self._contents and (block := self._block_of[name]) not in kept:
                prefix.append(block)
                name = self._contents[name].parent
            kept |= dict.fromkeys(reversed(prefix))
        self._cached.update(dict.fromkeys(reversed(kept)))
        self._free = deque(block for block in self._free if block not in self._name_of)

    def stored_blocks(self) -> list[StoredBlock]:
        """All published blocks. A block comes after the block before it, unless that was evicted
        and published again."""
        return list(self._contents.values())

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be handed out: empty blocks, and blocks that only cache a prefix."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached_blocks(self) -> int:
        return len(self._cached)

    def blocks_for(self, num_tokens: int) -> int:
        """The number of blocks that `num_tokens` tokens take."""
        return -(-num_tokens // self.block_size)

    def allocate_prompt(self, seq: Sequence) -> bool:
        """Gives a waiting sequence blocks for all its tokens, and shares the longest published
        prefix.

        At least one token is left to compute, because the logits of the last token are needed.
        Returns False and changes nothing when there are too few blocks. Another call then takes
        constant time until there may be enough blocks.
        """
        if self._needed.get(seq, 0) > self.num_free_blocks:
            return False
        shared = self._match_prefix(seq)
        missing = self.blocks_for(seq.num_tokens) - len(shared)
        needed = missing + sum(self._ref_counts[b] == 0 for b in shared)
        if needed > self.num_free_blocks:
            self._needed[seq] = needed
            return False
        self._needed.pop(seq, None)
        for block in shared:
            if self._ref_counts[block] == 0:
                del self._cached[block]
            self._ref_counts[block] += 1
        seq.block_table = array("i", shared)
        seq.num_published_blocks = len(shared)
        seq.begin_at(len(shared) * self.block_size)
        seq.block_table.extend(self._take() for _ in range(missing))
        return True

    def fork(self, parent: Sequence, child: Sequence) -> bool:
        """Gives a child, which holds no blocks, as many blocks as its tokens need. All its tokens
        but the last are its parent's, and those that the parent has computed are shared. Returns
        False and changes nothing when there are too few blocks."""
        shared = min(child.num_tokens - 1, parent.num_computed_tokens)
        full, partial = divmod(shared, self.block_size)
        missing = self.blocks_for(child.num_tokens) - full
        if missing > self.num_free_blocks:
            return False
        child.block_table = parent.block_table[:full]
        for block in child.block_table:
            self._ref_counts[block] += 1
        child.block_table.extend(self._take() for _ in range(missing))
        if partial:
            source = parent.block_table[full]
            source = self._copies.get(source, source)  # if it is a copy that is not made yet
            self._ref_counts[source] += 1
            self._copies[child.block_table[full]] = source
        child.block_hashes = parent.block_hashes[:full]
        child.num_published_blocks = min(full, parent.num_published_blocks)
        child.begin_at(shared)
        return True

    def take_copies(self) -> list[tuple[int, int]]:
        """Returns the block copies, (from, to), that the step being planned must make. Each copy is
        returned once, unless its step is lost."""
        copies = [(source, block) for block, source in self._copies.items()]
        self._copying |= self._copies
        self._copies = {}
        return copies

    def copied(self, copies: Iterable[tuple[int, int]]) -> None:
        """Notes that the step with these copies is answered."""
        for source, block in copies:
            del self._copying[block]
            self._release(source)

    def copy_again(self) -> None:
        """Notes that the steps in flight are lost, and may have copied or not."""
        lost = self._copies = self._copying | self._copies
        self._copying = {}
        for block in tuple(lost):
            while (first := lost.get(source := lost.get(block, -1))) is not None:
                lost[block] = first  # instead of a copy of a copy
                self._ref_counts[first] += 1
                self._release(source)

    def reserve(self, seq: Sequence, num_tokens: int, keep_free: int = 0) -> int:
        """Makes room for up to `num_tokens` next tokens of a running sequence, but leaves
        `keep_free` blocks. Returns the number of tokens that there is room for."""
        end = seq.num_scheduled_tokens + num_tokens
        while len(seq.block_table) < self.blocks_for(end) and self.num_free_blocks > keep_free:
            seq.block_table.append(self._take())
        room = len(seq.block_table) * self.block_size - seq.num_scheduled_tokens
        return min(room, num_tokens)

    def publish(self, seq: Sequence) -> None:
        """Makes the blocks that the computed tokens fill available to other sequences.

        Call it only once the step that wrote them has been answered.
        """
        full = seq.num_computed_tokens // self.block_size
        self._extend_hashes(seq, full)
        for i in range(seq.num_published_blocks, full):
            name, block = seq.block_hashes[i], seq.block_table[i]
            if name not in self._block_of:  # else another sequence computed the same prefix
                self._block_of[name] = block
                self._name_of[block] = name
                self._store(seq, i, block)
        seq.num_published_blocks = full

    def free(self, seq: Sequence) -> None:
        """Takes back a sequence's blocks. Their contents can be found until they are needed."""
        # Last block first: a prefix is evicted from its end.
        for block in reversed(seq.block_table):
            self._release(block)
        seq.block_table = array("i")

    def check_integrity(self, sequences: list[Sequence]) -> None:
        """Raises AssertionError unless every block is where it belongs, given all sequences that
        hold blocks. For tests."""
        references = array("i", bytes(4 * self.num_blocks))
        for seq in sequences:
            assert len(set(seq.block_table)) == len(seq.block_table), "a block twice in a table"
            for block in seq.block_table:
                references[block] += 1
        assert all(references[block] == 1 for block in self._copies), "a copy for nobody"
        assert not self._copies.keys() & set(self._copies.values()), "a copy of a copy"
        for block in (*self._copies.values(), *self._copying.values()):
            references[block] += 1
        assert references == self._ref_counts, "reference counts"
        free = [*self._free, *self._cached]
        assert len(set(free)) == len(free), "a block is free twice"
        assert set(free) == {b for b in range(self.num_blocks) if references[b] == 0}, "free blocks"
        assert all(b in self._name_of for b in self._cached), "a cached block without a name"
        assert not any(b in self._name_of for b in self._free), "a named block among the empty"
        assert {n: b for b, n in self._name_of.items()} == self._block_of, "names"
        assert self._contents.keys() == self._block_of.keys(), "contents"

    def _take(self) -> int:
        if self._free:
            block = self._free.popleft()
        else:
            block, _ = self._cached.popitem(last=False)
            name = self._name_of.pop(block)
            del self._block_of[name], self._contents[name]
            self.num_evictions += 1
            for listener in self.listeners:
                listener.removed(block, name)
        self._ref_counts[block] = 1
        return block

    def _release(self, block: int) -> None:
        self._ref_counts[block] -= 1
        if self._ref_counts[block] == 0:
            if block in self._name_of:
                self._cached[block] = None
            else:
                self._free.append(block)
            if block in self._copies:  # in vain
                self._release(self._copies.pop(block))

    def _store(self, seq: Sequence, i: int, block: int) -> None:
        """Records the contents of the sequence's block number `i`, which is being published."""
        tokens = seq.tokens[i * self.block_size : (i + 1) * self.block_size].tobytes()
        parent = seq.block_hashes[i - 1] if i else None
        stored = StoredBlock(seq.block_hashes[i], parent, tokens, seq.request.cache_salt)
        self._contents[stored.name] = stored
        for listener in self.listeners:
            listener.stored(block, stored)

    def _match_prefix(self, seq: Sequence) -> list[int]:
        full = seq.num_cacheable_tokens // self.block_size
        blocks: list[int] = []
        for i in range(full):
            self._extend_hashes(seq, i + 1)
            block = self._block_of.get(seq.block_hashes[i])
            if block is None:
                break
            blocks.append(block)
        return blocks

    def _extend_hashes(self, seq: Sequence, num_blocks: int) -> None:
        """Names the first `num_blocks` blocks. Tokens are not compared, because at 128 bits no
        collision is expected in the life of a cluster."""
        name_of = self._keyed_hash if seq.request.cache_salt else self._hash
        for i in range(len(seq.block_hashes), num_blocks):
            tokens = seq.tokens[i * self.block_size : (i + 1) * self.block_size].tobytes()
            parent = seq.block_hashes[i - 1] if i else name_of(seq.request.cache_salt.encode())
            seq.block_hashes.append(name_of(parent + tokens))

    def _hash(self, data: bytes) -> bytes:
        return xxhash.xxh3_128_digest(data, self._seed)

    def _keyed_hash(self, data: bytes) -> bytes:
        hashed = self._keyed.copy()
        hashed.update(data)
        return hashed.digest()
