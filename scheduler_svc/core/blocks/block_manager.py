"""Paged KV cache bookkeeping: which sequences hold a block, and which free blocks hold a prefix.

A block is in one of three places:

    free ───allocate───▶ in use (reference count > 0) ──last release──▶ free, if it has no name
                            ▲                                      └──▶ cached, if published
    cached ──match_prefix───┤
    cached ──allocate───────┘ the least recently released first, when no free block is left; its
                              name is forgotten

A full block has a name, which stands for the whole prefix (`block_names`). A prefix may continue in
the tier under the cache (`cache_tier`), from which it is read into blocks of the sequence.

A sequence has a table of blocks for each kind of layers, see `shared.paging`. In a table of layers
with a window, blocks are handed out chunk by chunk, and taken back once no token that is not
computed yet sees them. Their places repeat the first block that is held, for kernels may read it.

A fork shares the full blocks of the tokens that it has in common with its parent. The next step
copies a partly filled block (copy on write) before it writes anything. Steps run in order, so that
a step in flight may write what a copy reads. The source of a copy stays in use, even if no sequence
holds it, until the step that copies is answered. A lost step's copies are made by the next step.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from itertools import chain
from weakref import WeakKeyDictionary

from scheduler_svc.core.blocks.block_names import BlockNames
from scheduler_svc.core.blocks.cache_listener import CacheListener, StoredBlock
from scheduler_svc.core.blocks.cache_tier import CacheTier
from scheduler_svc.core.sequence import Sequence
from shared.paging import Paging, TableKind

_IN_TIER = -1  # in place of a block's number


class BlockManager:
    """Blocks 0 to `num_blocks - 1`. Every operation takes time proportional to the blocks of its
    sequence, never to the size of the cache.

    Args:
        key: of names with a salt, see `BlockNames`.
        published: by an earlier manager of this cache with this key, in the order in which they
            were published. They are cached.
    """

    def __init__(
        self,
        num_blocks: int,
        paging: Paging,
        key: bytes | None = None,
        published: Seq[tuple[int, StoredBlock]] = (),
    ) -> None:
        self.num_blocks = num_blocks
        self.paging = paging
        self.num_evictions = 0  # of cached blocks, to make room for new content
        self.tier = CacheTier()
        self.listeners: list[CacheListener] = []
        self._names = BlockNames(paging, key)
        self._empty()
        self._adopt(published)

    def reset(self) -> None:
        """Empties every block and forgets its holders. Call it when the cache has been lost."""
        for content in self._contents.values():
            self.tier.withdraw(content.name)
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
        self._pinned = Counter[int]()  # blocks that are being copied to the tier
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
        If the tier continues the prefix at less cost, `seq.blocks.loading` says what to read.

        At least one token is left to compute, for the logits of the last one are needed. Returns
        False if there are too few blocks, or while another sequence reads one that is needed. Until
        there may be enough blocks, another call takes constant time.
        """
        if self._needed.get(seq, 0) > self.num_free_blocks:
            return False
        cached, kinds = self._prefix_to_use(seq), self._kinds_of(seq)
        tables, needed = [], 0
        for names, kind in zip(seq.blocks.names, kinds, strict=True):
            first = kind.first_needed(cached)
            names = names[first : cached // kind.block_size]
            if not self.tier.reading.isdisjoint(names):
                return False
            found = array("i", [self._block_of.get(name, _IN_TIER) for name in names])
            tables.append(found[:1] * first + found)
            shared = [block for block in found if block != _IN_TIER]
            needed += kind.blocks_for(seq.num_tokens - first * kind.block_size) - len(shared)
            needed += sum(self._ref_counts[block] == 0 for block in shared)
        if needed > self.num_free_blocks:
            self._needed[seq] = needed
            return False
        self._needed.pop(seq, None)
        seq.blocks.tables, seq.blocks.first = tables, kinds[-1].first_needed(cached)
        for block in (each for each in chain(*seq.blocks.held()) if each != _IN_TIER):
            self._use(block)
        self._take_for_loading(seq)
        for table, kind in zip(tables, kinds, strict=True):
            if not kind.window:
                self._extend(table, kind.blocks_for(seq.num_tokens))
        self._begin(seq, cached, cached)
        return True

    def loaded(self, seq: Sequence, num_read: int) -> None:
        """Publishes the blocks that were read from the tier, the first `num_read`."""
        for number, i in seq.blocks.loading[:num_read]:
            self._publish(seq, number, i)
        seq.blocks.loading = []

    def pin(self, name: bytes) -> int:
        """Keeps the published block with this name as it is until `unpin` -> the block."""
        self._use(block := self._block_of[name])
        self._pinned[block] += 1
        return block

    def unpin(self, block: int) -> None:
        self._pinned[block] -= 1
        self._release(block)

    def fork(self, parent: Sequence, child: Sequence) -> bool:
        """Gives a child, which holds no blocks, as many blocks as its tokens need. All its tokens
        but the last are its parent's, and those that the parent has computed are shared. Returns
        False if there are too few blocks, or the parent lacks a block that the child needs."""
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
            self._names.extend(seq, number, full)
            for i in range(blocks.num_published // kind.block_size, full):
                self._publish(seq, number, i)
        blocks.num_published = computed - computed % self.paging.part_size
        first, table = kinds[-1].first_needed(computed), blocks.tables[-1]
        if first > blocks.first:
            for block in table[blocks.first : first]:
                self._release(block)
            table[:first] = table[first : first + 1] * first
            blocks.first = first

    def free(self, seq: Sequence) -> None:
        """Takes back a sequence's blocks. Their contents can be found until they are needed."""
        if self.tier.is_there and not seq.request.cache_salt:
            self._leave_to_tier(seq)
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
        for block in (*self._copies.values(), *self._copying.values(), *self._pinned.elements()):
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
        """Begins a sequence after `num_tokens` tokens, of which `published` are shared."""
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
        self.tier.withdraw(content.name)
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

    def _publish(self, seq: Sequence, number: int, i: int) -> None:
        """Publishes block `i` of a table of the sequence, and records its contents."""
        names, block = seq.blocks.names[number], seq.blocks.tables[number][i]
        old = self._block_of.get(names[i], -1)
        if old >= 0:
            if self._ref_counts[old]:  # others use it
                return
            # It was computed again, because the prefix had gaps. The newer one stays.
            del self._cached[old]
            self._forget(old)
            self._free.append(old)
        tokens = b"" if number else self._names.tokens(seq, number, i)
        parent, salt = names[i - 1] if i else None, seq.request.cache_salt
        stored = StoredBlock(names[i], parent, tokens, salt)
        self._block_of[stored.name], self._contents[block] = block, stored
        for listener in self.listeners:
            listener.stored(block, stored)
        if not salt and seq.request.may_store:
            self.tier.offer(names[i], parent)

    def _leave_to_tier(self, seq: Sequence) -> None:
        """Offers a sequence's published blocks to the tier, or erases them there."""
        if not seq.request.may_store:
            self.tier.erase(self._names.all_of(seq))
            return
        for names in seq.blocks.names:
            for parent, name in zip([None, *names], names, strict=False):
                if name in self._block_of:
                    self.tier.offer(name, parent)
            self.tier.use(names)

    def _use(self, block: int) -> None:
        self._cached.pop(block, None)
        self._ref_counts[block] += 1

    def _take_for_loading(self, seq: Sequence) -> None:
        """Replaces `_IN_TIER` in a sequence's tables by blocks to read into, and notes them."""
        blocks = seq.blocks
        for number, table in enumerate(blocks.tables):
            first = blocks.first if number == len(blocks.tables) - 1 else 0
            for i in range(first, len(table)):
                if table[i] == _IN_TIER:
                    table[i] = self._take()
                    blocks.loading.append((number, i))
                    self.tier.reading.add(blocks.names[number][i])
            table[:first] = table[first : first + 1] * first

    def _prefix_to_use(self, seq: Sequence) -> int:
        """The leading tokens that a sequence takes from the cache, or from cache and tier if that
        costs less than to compute them."""
        kinds, tier, published = self._kinds_of(seq), self.tier, self._block_of
        cached = self._names.match(seq, kinds, published.__contains__)
        if not tier.is_open or seq.request.cache_salt:
            return cached
        found = self._names.match(seq, kinds, lambda name: name in published or name in tier)
        return found if found > cached and tier.decide_to_load(found) else cached
