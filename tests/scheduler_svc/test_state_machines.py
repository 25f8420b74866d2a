"""Hypothesis looks for the shortest sequence of calls that breaks the block manager. It draws the
same calls each time; `python -m tests.simulation` draws others."""

from __future__ import annotations

from contextlib import ExitStack

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
from scheduler_svc.core.block_manager import BlockManager
from scheduler_svc.core.cache_listener import StoredBlock
from scheduler_svc.core.sampling import SamplingParams
from scheduler_svc.core.sequence import Sequence

BLOCK = 2
MANY = settings(
    derandomize=True,
    max_examples=100,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=9)


class BlockManagerMachine(RuleBasedStateMachine):
    """Records the content of each block independently, as the prefix that ends with it."""

    NUM_BLOCKS = 8
    sequences = Bundle("sequences")

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockManager(self.NUM_BLOCKS, BLOCK)
        self.live: list[Sequence] = []
        self.content: dict[int, list[int]] = {}
        self.sent: list[tuple[int, int]] = []  # copies that are not answered yet
        self.number = 0
        self.watching = ExitStack()
        self.watch = self.watching.enter_context(watched(self.blocks))
        self.watched: dict[bytes, StoredBlock] = {}  # what it has been told is there

    @rule(target=sequences, tokens=prompts)
    def admit(self, tokens: list[int]) -> Sequence:
        self.number += 1
        seq = Sequence((0, self.number), tokens, SamplingParams(max_tokens=99))
        before = self.blocks.num_free_blocks
        if self.blocks.allocate_prompt(seq):
            self.live.append(seq)
            shared = seq.num_computed_tokens // BLOCK
            assert seq.num_computed_tokens < len(tokens), "no token is left to compute"
            assert len(seq.block_table) == self.blocks.blocks_for(len(tokens))
            for i, block in enumerate(seq.block_table[:shared]):
                assert self.content[block] == tokens[: (i + 1) * BLOCK], "another prefix"
        else:
            assert self.blocks.num_free_blocks == before < self.blocks.blocks_for(len(tokens))
            assert not seq.block_table
        return seq

    @rule(seq=sequences, num_tokens=st.integers(1, 9))
    def compute(self, seq: Sequence, num_tokens: int) -> None:
        """Runs a step that computes some of the tokens, and its answer."""
        if seq not in self.live:
            return
        self.send_copies()
        self.answer_copies()
        for i, block in enumerate(
            seq.block_table[: self.blocks.blocks_for(seq.num_computed_tokens)]
        ):
            end = min((i + 1) * BLOCK, seq.num_computed_tokens)
            assert self.content[block][:end] == seq.tokens[:end].tolist(), "reads other content"
        end = min(seq.num_computed_tokens + num_tokens, seq.num_tokens)
        for i in range(seq.num_computed_tokens // BLOCK, self.blocks.blocks_for(end)):
            block = seq.block_table[i]
            assert not any(block in s.block_table for s in self.live if s is not seq), "is shared"
            self.content[block] = seq.tokens[: (i + 1) * BLOCK].tolist()
        seq.num_computed_tokens = seq.num_scheduled_tokens = end
        self.blocks.publish(seq)

    @rule(seq=sequences, token=st.integers(0, 1))
    def append(self, seq: Sequence, token: int) -> None:
        """Appends a token to a sequence that has computed all of its own."""
        if seq not in self.live or seq.num_computed_tokens < seq.num_tokens:
            return
        free, room = self.blocks.num_free_blocks, len(seq.block_table) * BLOCK - seq.num_tokens
        assert self.blocks.reserve(seq, 1) == (room > 0 or free > 0)
        if room > 0 or free > 0:
            seq.tokens.append(token)
            assert len(seq.block_table) == self.blocks.blocks_for(seq.num_tokens)

    @rule(target=sequences, parent=sequences, token=st.none() | st.integers(0, 1))
    def fork(self, parent: Sequence, token: int | None) -> Sequence:
        """Forks a child with the same tokens, or with one more than the parent has computed."""
        self.number += 1
        if token is None or parent not in self.live:
            tokens = parent.tokens.tolist()
        else:
            tokens = [*parent.tokens[: parent.num_computed_tokens], token]
        child = Sequence((0, self.number), tokens, SamplingParams(max_tokens=99))
        if parent not in self.live or not self.blocks.fork(parent, child):
            return child
        self.live.append(child)
        assert child.num_computed_tokens < len(tokens), "no token is left to compute"
        assert len(child.block_table) == self.blocks.blocks_for(len(tokens))
        for i, block in enumerate(child.block_table[: child.num_computed_tokens // BLOCK]):
            assert self.content[block] == tokens[: (i + 1) * BLOCK], "another prefix"
        return child

    @rule()
    def send_copies(self) -> None:
        """Makes the pending copies, as a step does first."""
        tables = {block: seq for seq in self.live for block in seq.block_table}
        copies = self.blocks.take_copies()
        read = {block: list(self.content[block]) for block, _ in copies}
        for source, block in copies:
            seq = tables[block]
            place = seq.block_table.index(block)
            end = min((place + 1) * BLOCK, seq.num_computed_tokens)
            assert read[source][:end] == seq.tokens[:end].tolist(), "copies the wrong content"
            self.content[block] = read[source]
        self.sent += copies

    def answer_copies(self) -> None:
        self.blocks.copied(self.sent)
        self.sent = []

    @rule(made=st.integers(0, 3))
    def lose_copies(self, made: int) -> None:
        """Loses the steps in flight, of which some copies have been made."""
        for _, block in self.sent[made:]:
            self.content[block] = []
        self.sent = []
        self.blocks.copy_again()

    @rule(seq=consumes(sequences))
    def free(self, seq: Sequence) -> None:
        if seq in self.live:
            if any(block in seq.block_table for _, block in self.sent):
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
            block = self.blocks._block_of[stored.name]
            prefix = self.content[block]
            assert np.frombuffer(stored.token_ids, "<i4").tolist() == prefix[-BLOCK:]
            assert (stored.parent is None) == (len(prefix) == BLOCK)

    @invariant()
    def every_block_is_where_it_belongs(self) -> None:
        self.blocks.check_integrity(self.live)
        held = {block for seq in self.live for block in seq.block_table}
        # Even if they are in no table:
        held.update(self.blocks._copies.values(), (source for source, _ in self.sent))
        assert self.blocks.num_free_blocks == self.NUM_BLOCKS - len(held)


TestBlockManager = BlockManagerMachine.TestCase
TestBlockManager.settings = MANY
