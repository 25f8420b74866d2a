"""Hypothesis looks for the shortest sequence of calls that breaks the block manager. It draws the
same calls each time; `python -m tests.simulation` draws others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from itertools import chain

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    precondition,
    rule,
)

from scheduler_svc.block_watch import Removed, watched
from scheduler_svc.core.blocks.block_manager import BlockManager
from scheduler_svc.core.blocks.cache_listener import StoredBlock
from scheduler_svc.core.sampling import SamplingParams
from scheduler_svc.core.sequence import Sequence
from shared.paging import Paging

MANY = settings(
    derandomize=True,
    max_examples=100,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=9)


class BlockManagerMachine(RuleBasedStateMachine):
    """Records the content of each block independently: its table, and the prefix that ends with
    it."""

    NUM_BLOCKS = 8
    PAGING = Paging(2)
    sequences = Bundle("sequences")

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockManager(self.NUM_BLOCKS, self.PAGING)
        self.live: list[Sequence] = []
        self.content: dict[int, tuple[int, list[int]]] = {}
        self.sent: list[tuple[int, int]] = []  # copies that are not answered yet
        self.number = 0
        self.watching = ExitStack()
        self.watch = self.watching.enter_context(watched(self.blocks))
        self.watched: dict[bytes, StoredBlock] = {}  # what it has been told is there

    def sequence(self, tokens: list[int], reads_tokens: bool) -> Sequence:
        self.number += 1
        penalty = 1.5 if reads_tokens else 1.0
        return Sequence(
            (0, self.number), tokens, SamplingParams(max_tokens=99, repetition_penalty=penalty)
        )

    def seen(self, seq: Sequence, end: int) -> Iterator[tuple[int, int, int]]:
        """The blocks that the token at `end` sees: table, place and block."""
        for number, (size, window) in enumerate(self.PAGING.tables):
            first = end + 1 - window if window else 0
            if number == 0 and seq.params.reads_tokens:
                first = 0
            for place in range(max(first, 0) // size, -(-end // size)):
                yield number, place, seq.blocks.tables[number][place]

    def check_seen(self, seq: Sequence) -> None:
        """The blocks that the next token sees hold its prefix."""
        end = seq.num_computed_tokens
        for number, place, block in self.seen(seq, end):
            table, tokens = self.content[block]
            known = min((place + 1) * self.PAGING.tables[number].block_size, end)
            assert table == number, "of the other layers"
            assert tokens[:known] == seq.tokens[:known].tolist(), "reads other content"

    def missing(self, seq: Sequence) -> int:
        return self.blocks.missing([seq]) if seq.blocks.capacity == seq.num_scheduled_tokens else 0

    def holders(self, block: int) -> list[Sequence]:
        return [seq for seq in self.live if block in chain(*seq.blocks.held())]

    @rule(target=sequences, tokens=prompts, reads_tokens=st.booleans())
    def admit(self, tokens: list[int], reads_tokens: bool) -> Sequence:
        seq = self.sequence(tokens, reads_tokens)
        before = self.blocks.num_free_blocks
        if self.blocks.allocate_prompt(seq):
            self.live.append(seq)
            assert seq.num_computed_tokens < len(tokens), "no token is left to compute"
            self.check_seen(seq)
        else:
            assert self.blocks.num_free_blocks == before
            assert before < sum(-(-len(tokens) // size) for size, _ in self.PAGING.tables)
            assert not seq.blocks.tables
        return seq

    @rule(seq=sequences, num_tokens=st.integers(1, 9))
    def compute(self, seq: Sequence, num_tokens: int) -> None:
        """Runs a step that computes some of the tokens, and its answer."""
        if seq not in self.live:
            return
        self.send_copies()
        self.answer_copies()
        self.check_seen(seq)
        start = seq.num_computed_tokens
        wanted = min(num_tokens, seq.num_tokens - start)
        missing, free = self.missing(seq), self.blocks.num_free_blocks
        room = self.blocks.reserve(seq, wanted) if wanted else 0
        assert 0 <= room <= wanted
        assert room or missing > free or not wanted, "there was room"
        end = start + room
        for number, (size, _) in enumerate(self.PAGING.tables):
            for place in range(start // size, -(-end // size)):
                block = seq.blocks.tables[number][place]
                assert self.holders(block) == [seq], "is shared"
                self.content[block] = number, seq.tokens[: (place + 1) * size].tolist()
        seq.num_computed_tokens = seq.num_scheduled_tokens = end
        self.blocks.advance(seq)
        self.check_seen(seq)
        for (size, window), table in zip(self.PAGING.tables, seq.blocks.held(), strict=True):
            if window and not seq.params.reads_tokens:
                kept = len(table) - max(seq.blocks.capacity - end, 0) // size
                assert kept <= window // size + 3, "keeps what no token sees"
                first = seq.blocks.first
                assert not first or (first + 1) * size <= end, "the first block is not full"

    @rule(seq=sequences, token=st.integers(0, 1))
    def append(self, seq: Sequence, token: int) -> None:
        """Appends a token to a sequence that has computed all of its own."""
        if seq not in self.live or seq.num_computed_tokens < seq.num_tokens:
            return
        has_room = self.missing(seq) <= self.blocks.num_free_blocks
        assert has_room or seq.blocks.capacity == seq.num_tokens
        if has_room:
            assert self.blocks.reserve(seq, 1) == 1
            seq.tokens.append(token)

    @rule(target=sequences, parent=sequences, token=st.none() | st.integers(0, 1))
    def fork(self, parent: Sequence, token: int | None) -> Sequence:
        """Forks a child with the same tokens, or with one more than the parent has computed."""
        if token is None or parent not in self.live:
            tokens = parent.tokens.tolist()
        else:
            tokens = [*parent.tokens[: parent.num_computed_tokens], token]
        child = self.sequence(tokens, parent.params.reads_tokens)
        if parent not in self.live or not self.blocks.fork(parent, child):
            return child
        self.live.append(child)
        assert child.num_computed_tokens < len(tokens), "no token is left to compute"
        for number, place, block in self.seen(child, child.num_computed_tokens):
            size, end = self.PAGING.tables[number].block_size, child.num_computed_tokens
            if (place + 1) * size <= end:  # else it is copied
                assert self.content[block] == (number, tokens[: (place + 1) * size])
        return child

    @rule()
    def send_copies(self) -> None:
        """Makes the pending copies, as a step does first."""
        copies = self.blocks.take_copies()
        read = {block: self.content[block] for block, _ in copies}
        for source, block in copies:
            (seq,) = self.holders(block)
            number, found = read[source]
            place = seq.blocks.tables[number].index(block)
            size = self.PAGING.tables[number].block_size
            end = min((place + 1) * size, seq.num_computed_tokens)
            assert found[:end] == seq.tokens[:end].tolist(), "copies the wrong content"
            self.content[block] = read[source]
        self.sent += copies

    def answer_copies(self) -> None:
        self.blocks.copied(self.sent)
        self.sent = []

    @rule(made=st.integers(0, 3))
    def lose_copies(self, made: int) -> None:
        """Loses the steps in flight, of which some copies have been made."""
        for _, block in self.sent[made:]:
            self.content[block] = -1, []
        self.sent = []
        self.blocks.copy_again()

    @rule(seq=consumes(sequences))
    def free(self, seq: Sequence) -> None:
        if seq in self.live:
            if any(block in chain(*seq.blocks.held()) for _, block in self.sent):
                self.answer_copies()  # blocks are not freed while a step in flight writes them
            self.live.remove(seq)
            self.blocks.free(seq)

    @precondition(lambda self: self.blocks.num_free_blocks == self.NUM_BLOCKS)
    @rule()
    def reset(self) -> None:
        self.blocks.reset()
        assert not self.blocks.num_cached_blocks

    @invariant()
    def a_watch_knows_what_is_published(self) -> None:
        for event in self.watch.take():
            if isinstance(event, StoredBlock):
                assert event.name not in self.watched
                self.watched[event.name] = event
            elif isinstance(event, Removed):
                del self.watched[event.name]
            else:
                self.watched.clear()
        assert {each.name: each for each in self.blocks.stored_blocks()} == self.watched
        for stored in self.blocks.stored_blocks():
            number, prefix = self.content[self.blocks._block_of[stored.name]]
            size = self.PAGING.block_size
            assert number == 0
            assert np.frombuffer(stored.token_ids, "<i4").tolist() == prefix[-size:]
            assert (stored.parent is None) == (len(prefix) == size)

    @invariant()
    def every_block_is_where_it_belongs(self) -> None:
        self.blocks.check_integrity(self.live)
        held = {block for seq in self.live for block in chain(*seq.blocks.held())}
        # Even if they are in no table:
        held.update(self.blocks._copies.values(), (source for source, _ in self.sent))
        assert self.blocks.num_free_blocks == self.NUM_BLOCKS - len(held)


TestBlockManager = BlockManagerMachine.TestCase
TestBlockManager.settings = MANY


class WindowMachine(BlockManagerMachine):
    """All layers have a window."""

    PAGING = Paging(2, window=4)


class TwoTablesMachine(BlockManagerMachine):
    """Fewer layers see all tokens than have a window."""

    NUM_BLOCKS = 11
    PAGING = Paging(4, window=3, window_block_size=2)


class FewWindowsMachine(BlockManagerMachine):
    """Fewer layers have a window than see all tokens."""

    NUM_BLOCKS = 11
    PAGING = Paging(2, window=3, window_block_size=4)


TestWindow = WindowMachine.TestCase
TestTwoTables = TwoTablesMachine.TestCase
TestFewWindows = FewWindowsMachine.TestCase
TestWindow.settings = TestTwoTables.settings = TestFewWindows.settings = MANY
