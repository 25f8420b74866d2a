"""Paged KV cache bookkeeping: which sequences hold a block, and which free blocks hold a prefix.

A block is in one of three places:

    free ───allocate───▶ in use (reference count > 0) ──last release──▶ free, if it has no name
                            ▲                                      └──▶ cached, if published
    cached ──match_prefix───┤
    cached ──allocate───────┘ the least recently released first, when no free block is left; its
                              name is forgotten

Prefix caching follows vLLM's automatic prefix caching. A full block's name is a hash of its tokens
chained with the name of the block before it. A name therefore stands for the whole prefix. The
first block is chained with the number of its table and the sequence's cache salt, so that only
requests with that salt share its prefixes. Names with a salt are BLAKE2b hashes (RFC 7693) with a
random key, which nobody can forge. For XXH3, input pairs are known that collide under any seed
(issue 1127 of Cyan4973/xxHash).

A sequence has a table of blocks for each kind of layers, see `shared.paging`. In a table of layers
with a window, blocks are handed out chunk by chunk, and taken back once no token that is not
computed yet sees them. Their places repeat the first block that is held, for kernels may read it.

A fork shares the full blocks of the tokens that it has in common with its parent. The next step
copies a partly filled block (copy on write) before it writes anything. Steps run in order, so that
a step in flight may write what a copy reads. The source of a copy stays in use, even if no sequence
holds it, until the step that copies is answered. A lost step's copies are made by the next step.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from itertools import chain
from weakref import WeakKeyDictionary

import xxhash

from scheduler_svc.core.cache_listener import CacheListener, Naming, StoredBlock
from scheduler_svc.core.sequence import Sequence
from shared.paging import Paging, TableKind

_NAME_BYTES = 16


class BlockManager:
    """Blocks 0 to `num_blocks - 1`. Every operation takes time proportional to the blocks of its
    sequence, never to the size of the cache.

    Args:
        naming, published: those of an earlier manager of this cache. The published blocks, in the
            order in which they were published, are cached.
    """

    def __init__(
        self,
        num_blocks: int,
        paging: Paging,
        naming: Naming | None = None,
        published: Seq[tuple[int, StoredBlock]] = (),
    ) -> None:
        self.num_blocks = num_blocks
        self.paging = paging
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
        self._contents: dict[int, StoredBlock] = {}  # by published block
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
            self._block_of[stored.name], self._contents[block] = block, stored
        kept: dict[int, None] = {}  # in reverse order of eviction
        for _, stored in reversed(published):
            prefix: list[int] = []
            name: bytes | None = stored.name
            while name in self._block_of and (block := self._block_of[name]) not in kept:
                prefix.append(block)
                name = self._contents[block].parent
            kept |= dict.fromkeys(reversed(prefix))
        self._cached.update(dict.fromkeys(reversed(kept)))
        self._free = deque(block for block in self._free if block not in self._contents)

    def stored_blocks(self) -> list[StoredBlock]:
        """The published blocks of first tables. A block comes after the block before it, unless
        that was evicted and published again."""
        return [each for each in self._contents.values() if each.token_ids]

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be handed out: empty blocks, and blocks that only cache a prefix."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached_blocks(self) -> int:
        return len(self._cached)

    def allocate_prompt(self, seq: Sequence) -> bool:
        """Gives a waiting sequence the longest published prefix, and blocks for all its tokens in
        tables without a window. In those with one, it only makes sure that there will be enough.

        At least one token is left to compute, because the logits of the last token are needed.
        Returns False and changes nothing when there are too few blocks. Another call then takes
        constant time until there may be enough blocks.
        """
        if self._needed.get(seq, 0) > self.num_free_blocks:
            return False
        cached, kinds = self._match_prefix(seq), self._kinds_of(seq)
        tables, needed = [], 0
        for names, kind in zip(seq.blocks.names, kinds, strict=True):
            first = kind.first_needed(cached)
            names = names[first : cached // kind.block_size]
            shared = array("i", [self._block_of[name] for name in names])
            tables.append(shared[:1] * first + shared)
            needed += kind.blocks_for(seq.num_tokens - first * kind.block_size) - len(shared)
            needed += sum(self._ref_counts[block] == 0 for block in shared)
        if needed > self.num_free_blocks:
            self._needed[seq] = needed
            return False
        self._needed.pop(seq, None)
        seq.blocks.tables, seq.blocks.first = tables, kinds[-1].first_needed(cached)
        for block in chain(*seq.blocks.held()):
            if self._ref_counts[block] == 0:
                del self._cached[block]
            self._ref_counts[block] += 1
        for table, kind in zip(tables, kinds, strict=True):
            if not kind.window:
                self._extend(table, kind.blocks_for(seq.num_tokens))
        self._begin(seq, cached, cached)
        return True

    def fork(self, parent: Sequence, child: Sequence) -> bool:
        """Gives a child, which holds no blocks, as many blocks as its tokens need. All its tokens
        but the last are its parent's, and those that the parent has computed are shared. Returns
        False and changes nothing when there are too few blocks, or if the parent does not hold a
        block any more that the child needs."""
        shared, kinds = min(child.num_tokens - 1, parent.num_computed_tokens), self._kinds_of(child)
        full = [shared // kind.block_size for kind in kinds]
        wanted = [-(-child.num_tokens // kind.block_size) for kind in kinds]
        missing, first = sum(wanted) - sum(full), parent.blocks.first
        if missing > self.num_free_blocks or first > kinds[-1].first_needed(shared):
            return False
        tables = [table[:n] for table, n in zip(parent.blocks.tables, full, strict=True)]
        child.blocks.tables, child.blocks.first = tables, first
        for block in chain(*child.blocks.held()):
            self._ref_counts[block] += 1
        for number, table in enumerate(tables):
            self._extend(table, wanted[number])
            if shared % kinds[number].block_size:
                source = parent.blocks.tables[number][full[number]]
                source = self._copies.get(source, source)  # if it is a copy that is not made yet
                self._ref_counts[source] += 1
                self._copies[table[full[number]]] = source
        tables[-1][:first] = tables[-1][first : first + 1] * first
        child.blocks.names = [h[:n] for h, n in zip(parent.blocks.names, full, strict=True)]
        self._begin(child, shared, min(shared, parent.blocks.num_published))
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

    def blocks_for(self, seq: Sequence) -> int:
        """The number of blocks that a sequence needs at least, if it shares none."""
        return sum(kind.blocks_for(seq.num_tokens) for kind in self._kinds_of(seq))

    def missing(self, full: Seq[Sequence]) -> int:
        """The number of blocks that running sequences, which have no room, need for a token."""
        if len(self.paging.tables) == 1:
            return len(full)
        return sum(room <= seq.num_scheduled_tokens for seq in full for room in self._rooms(seq))

    def reserve(self, seq: Sequence, num_tokens: int, keep_free: int = 0) -> int:
        """Makes room for up to `num_tokens` next tokens of a running sequence, but leaves
        `keep_free` blocks. Returns the number of tokens that there is room for."""
        end = seq.num_scheduled_tokens + num_tokens
        if end > seq.blocks.capacity:
            for number, (block_size, _) in enumerate(self.paging.tables):
                table = seq.blocks.tables[number]
                while len(table) * block_size < end and self.num_free_blocks > keep_free:
                    table.append(self._take())
            seq.blocks.capacity = min(self._rooms(seq))
        return min(seq.blocks.capacity - seq.num_scheduled_tokens, num_tokens)

    def advance(self, seq: Sequence) -> None:
        """Makes the blocks that the computed tokens fill available to other sequences, and takes
        back the blocks that no later token sees.

        Call it only once the step that computed the tokens has been answered.
        """
        computed, kinds, blocks = seq.num_computed_tokens, self._kinds_of(seq), seq.blocks
        for number, kind in enumerate(kinds):
            full = computed // kind.block_size
            self._extend_hashes(seq, number, full)
            for i in range(blocks.num_published // kind.block_size, full):
                name, block = blocks.names[number][i], blocks.tables[number][i]
                old = self._block_of.get(name, -1)
                if old < 0 or not self._ref_counts[old]:  # else others use it
                    if old >= 0:  # computed again, because the prefix had gaps: the newer one stays
                        del self._cached[old]
                        self._forget(old)
                        self._free.append(old)
                    self._store(seq, number, i, block)
        blocks.num_published = computed - computed % self.paging.part_size
        first, table = kinds[-1].first_needed(computed), blocks.tables[-1]
        if first > blocks.first:
            for block in table[blocks.first : first]:
                self._release(block)
            table[:first] = table[first : first + 1] * first
            blocks.first = first

    def free(self, seq: Sequence) -> None:
        """Takes back a sequence's blocks. Their contents can be found until they are needed."""
        for blocks in seq.blocks.held():
            # Last block first: a prefix is evicted from its end.
            for block in reversed(blocks):
                self._release(block)
        seq.blocks.clear()

    def check_integrity(self, sequences: list[Sequence]) -> None:
        """Raises AssertionError unless every block is where it belongs, given all sequences that
        hold blocks. For tests."""
        references = array("i", bytes(4 * self.num_blocks))
        for seq in sequences:
            held = [*chain(*seq.blocks.held())]
            assert len(set(held)) == len(held), "a block twice in a sequence"
            for block in held:
                references[block] += 1
            first, table = seq.blocks.first, seq.blocks.tables[-1]
            assert set(table[:first]) <= {*table[first : first + 1]}, "a block that is not held"
        assert all(references[block] == 1 for block in self._copies), "a copy for nobody"
        assert not self._copies.keys() & set(self._copies.values()), "a copy of a copy"
        for block in (*self._copies.values(), *self._copying.values()):
            references[block] += 1
        assert references == self._ref_counts, "reference counts"
        free = [*self._free, *self._cached]
        assert len(set(free)) == len(free), "a block is free twice"
        assert set(free) == {b for b in range(self.num_blocks) if references[b] == 0}, "free blocks"
        assert all(b in self._contents for b in self._cached), "a cached block without a name"
        assert not any(b in self._contents for b in self._free), "a named block among the empty"
        assert {n: b for b, (n, *_) in self._contents.items()} == self._block_of, "names"

    def _kinds_of(self, seq: Sequence) -> tuple[TableKind, ...]:
        keeps = seq.features and seq.params.reads_tokens
        return self.paging.keeping if keeps else self.paging.tables

    def _begin(self, seq: Sequence, num_tokens: int, published: int) -> None:
        """Notes that a sequence which got its blocks begins after `num_tokens` tokens, of which
        `published` are available to others."""
        seq.blocks.num_published = published - published % self.paging.part_size
        seq.begin_at(num_tokens)
        seq.blocks.capacity = min(self._rooms(seq))

    def _rooms(self, seq: Sequence) -> list[int]:
        """The number of tokens for which each of the sequence's tables has blocks."""
        kinds = zip(seq.blocks.tables, self.paging.tables, strict=True)
        return [len(table) * kind.block_size for table, kind in kinds]

    def _extend(self, table: array[int], length: int) -> None:
        table.extend(self._take() for _ in range(length - len(table)))

    def _take(self) -> int:
        if self._free:
            block = self._free.popleft()
        else:
            block, _ = self._cached.popitem(last=False)
            self._forget(block)
            self.num_evictions += 1
        self._ref_counts[block] = 1
        return block

    def _forget(self, block: int) -> None:
        content = self._contents.pop(block)
        del self._block_of[content.name]
        for listener in self.listeners:
            listener.removed(block, content)

    def _release(self, block: int) -> None:
        self._ref_counts[block] -= 1
        if self._ref_counts[block] == 0:
            if block in self._contents:
                self._cached[block] = None
            else:
                self._free.append(block)
            if block in self._copies:  # in vain
                self._release(self._copies.pop(block))

    def _store(self, seq: Sequence, number: int, i: int, block: int) -> None:
        """Publishes block `i` of a table of the sequence, and records its contents."""
        names, tokens = seq.blocks.names[number], b"" if number else self._tokens(seq, number, i)
        parent = names[i - 1] if i else None
        stored = StoredBlock(names[i], parent, tokens, seq.request.cache_salt)
        self._block_of[stored.name], self._contents[block] = block, stored
        for listener in self.listeners:
            listener.stored(block, stored)

    def _match_prefix(self, seq: Sequence) -> int:
        """The number of leading tokens whose blocks are published, as far as later tokens see
        them. Names these blocks."""
        seq.blocks.names = seq.blocks.names or [[] for _ in self.paging.tables]
        cached, size = seq.num_cacheable_tokens, self.paging.slots_per_block
        for number, kind in enumerate(self._kinds_of(seq)):
            if kind.window:
                cached -= cached % size
                i = cached // kind.block_size
                while i > kind.first_needed(cached):
                    i -= 1
                    if not self._is_published(seq, number, i):
                        cached = i * kind.block_size // size * size
                        i = cached // kind.block_size
            else:
                i = 0
                while (i + 1) * kind.block_size <= cached and self._is_published(seq, number, i):
                    i += 1
                cached = i * kind.block_size
        return cached

    def _is_published(self, seq: Sequence, number: int, i: int) -> bool:
        self._extend_hashes(seq, number, i + 1)
        return seq.blocks.names[number][i] in self._block_of

    def _extend_hashes(self, seq: Sequence, number: int, num_blocks: int) -> None:
        """Names the first `num_blocks` blocks of a table. Tokens are not compared, because at 128
        bits no collision is expected in the life of a cluster."""
        salt, names = seq.request.cache_salt.encode(), seq.blocks.names[number]
        for i in range(len(names), num_blocks):
            parent = names[i - 1] if i else self._hash(bytes([number]) + salt, salt)
            names.append(self._hash(parent + self._tokens(seq, number, i), salt))

    def _tokens(self, seq: Sequence, number: int, i: int) -> bytes:
        """The tokens of block `i` of a table of the sequence."""
        size = self.paging.tables[number].block_size
        return seq.tokens[i * size : (i + 1) * size].tobytes()

    def _hash(self, data: bytes, salt: bytes) -> bytes:
        if not salt:
            return xxhash.xxh3_128_digest(data, self._seed)
        hashed = self._keyed.copy()
        hashed.update(data)
        return hashed.digest()
