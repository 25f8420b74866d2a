"""Hypothesis looks for the shortest sequence of calls that breaks the block manager or the
scheduler."""

from __future__ import annotations

from collections import deque

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

from scheduler_svc.admission import Limits
from scheduler_svc.block_manager import BlockManager
from scheduler_svc.scheduler import Scheduler, Step
from scheduler_svc.sequence import FinishCause, SamplingParams, Sequence
from scheduler_svc.worker_client import encode_step
from tests import sanitizer
from tests.oracle import VOCAB_SIZE, completion, states
from tests.sanitizer import Beside, Owner, Sanitizer

BLOCK = 2
MANY = settings(
    max_examples=200,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=9)


class BlockManagerMachine(RuleBasedStateMachine):
    """What a block holds is written down beside it, as the prefix that ends with it."""

    NUM_BLOCKS = 8
    sequences = Bundle("sequences")

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockManager(self.NUM_BLOCKS, BLOCK)
        self.live: list[Sequence] = []
        self.content: dict[int, list[int]] = {}
        self.number = 0

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
        """A step that computes some of the tokens, answered."""
        if seq not in self.live:
            return
        end = min(seq.num_computed_tokens + num_tokens, seq.num_tokens)
        for i in range(seq.num_computed_tokens // BLOCK, self.blocks.blocks_for(end)):
            block = seq.block_table[i]
            assert not any(block in s.block_table for s in self.live if s is not seq), "is shared"
            self.content[block] = seq.tokens[: (i + 1) * BLOCK].tolist()
        seq.num_computed_tokens = seq.num_scheduled_tokens = end
        self.blocks.publish(seq)

    @rule(seq=sequences, token=st.integers(0, 1))
    def append(self, seq: Sequence, token: int) -> None:
        """The next token of one that has computed all it had."""
        if seq not in self.live or seq.num_computed_tokens < seq.num_tokens:
            return
        free, room = self.blocks.num_free_blocks, len(seq.block_table) * BLOCK - seq.num_tokens
        assert self.blocks.append_slot(seq) == (room > 0 or free > 0)
        if room > 0 or free > 0:
            seq.tokens.append(token)
            assert len(seq.block_table) == self.blocks.blocks_for(seq.num_tokens)

    @rule(seq=consumes(sequences))
    def free(self, seq: Sequence) -> None:
        if seq in self.live:
            self.live.remove(seq)
            self.blocks.free(seq)

    @invariant()
    def every_block_is_where_it_belongs(self) -> None:
        self.blocks.check_integrity(self.live)
        held = {block for seq in self.live for block in seq.block_table}
        assert self.blocks.num_free_blocks == self.NUM_BLOCKS - len(held)


class SchedulerMachine(RuleBasedStateMachine):
    """Up to two steps in flight, whose tokens the sanitizer computes."""

    NUM_BLOCKS = 7
    LIMITS = Limits(
        max_num_seqs=3,
        max_num_batched_tokens=6,
        max_model_len=NUM_BLOCKS * BLOCK,
        max_waiting=5,
        vocab_size=VOCAB_SIZE,
    )

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = Scheduler(self.LIMITS, BlockManager(self.NUM_BLOCKS, BLOCK))
        self.in_flight: deque[tuple[Step, list[int]]] = deque()
        self.expected: dict[int, list[int]] = {}  # what open requests are still to get
        self.deadlines: dict[int, float] = {}
        self.now = 0.0
        self.sequences: dict[int, tuple[Sequence, Owner]] = {}
        self.number = 0
        self.epoch = 0
        self.new_epoch()

    def key(self, number: int) -> tuple[int, int]:
        return number % 2, number  # two frontends

    def new_epoch(self) -> None:
        self.epoch += 1
        self.step_id = self.answered = 0
        limits = sanitizer.Limits(
            self.LIMITS.max_num_seqs,
            self.LIMITS.max_num_batched_tokens,
            self.LIMITS.max_model_len,
        )
        self.sanitizer = Sanitizer(limits, self.NUM_BLOCKS, BLOCK, self.epoch)

    @rule(
        prompt=prompts,
        max_tokens=st.integers(1, 6),
        ends_at=st.integers(0, 8),
        has=st.integers(0, 2),
        lasts=st.none() | st.integers(1, 9),
        priority=st.integers(-1, 1),
        salt=st.integers(0, 1),
    )
    def add(
        self,
        prompt: list[int],
        max_tokens: int,
        ends_at: int,
        has: int,
        lasts: int | None,
        priority: int,
        salt: int,
    ) -> None:
        self.number += 1
        tokens = completion(prompt, max_tokens)
        params = SamplingParams(max_tokens, eos_token_ids=frozenset(tokens[ends_at : ends_at + 1]))
        ends = [i for i, token in enumerate(tokens) if token in params.eos_token_ids]
        tokens = tokens[: ends[0] + 1] if ends else tokens
        deadline = None if lasts is None else self.now + lasts
        seq = Sequence(
            self.key(self.number),
            prompt,
            params,
            generated_ids=tokens[:has],
            deadline=deadline,
            priority=priority,
            cache_salt=str(salt),
        )
        needed = prompt + completion(prompt, max_tokens - 1)
        owner = Owner(f"{self.number}", self.number, salt, 0, np.array(states(needed)))
        self.sequences[self.number] = (seq, owner)
        room = self.scheduler.num_waiting < self.LIMITS.max_waiting
        refused = self.scheduler.add(seq)
        if len(prompt) + max_tokens > self.LIMITS.max_model_len:
            assert refused
            assert refused.finished is FinishCause.INVALID
        elif refused is None:
            self.expected[self.number] = tokens[has:]
            assert room
            if deadline is not None:
                self.deadlines[self.number] = deadline
        else:
            assert refused.finished is FinishCause.QUEUE_FULL if not room else has >= len(tokens)

    @precondition(lambda self: len(self.in_flight) < 2)
    @rule()
    def schedule(self) -> None:
        step = self.scheduler.schedule(self.now)
        if step is None:
            assert self.in_flight or not self.expected, "nothing to do, and requests are open"
            return
        assert all(row.seq.key[1] in self.expected for row in step.rows), "one that has ended"
        self.step_id += 1
        request = encode_step(step, BLOCK, self.epoch, self.step_id)
        self.in_flight.append((step, self.sanitizer.run(request, self.beside(step))))

    @precondition(lambda self: self.in_flight)
    @rule()
    def answer(self) -> None:
        outputs = self.scheduler.apply(*self.in_flight.popleft())
        self.answered += 1
        for output in outputs:
            left = self.expected[output.seq.key[1]]
            assert output.token == left.pop(0), "a wrong token"
            assert (output.finished is not None) == (not left), "ends too early or too late"
            if not left:
                del self.expected[output.seq.key[1]]

    @rule(number=st.integers(0, 3))
    def abort(self, number: int) -> None:
        """One of the latest, which may have ended."""
        self.scheduler.abort(self.key(self.number - number))
        self.expected.pop(self.number - number, None)

    @rule(seconds=st.integers(1, 4))
    def pass_time(self, seconds: int) -> None:
        self.now += seconds
        due = {n for n in self.expected if self.deadlines.get(n, self.now + 1) <= self.now}
        outputs = self.scheduler.expire(self.now)
        assert {output.seq.key[1] for output in outputs} == due
        assert {output.finished for output in outputs} <= {FinishCause.DEADLINE}
        for number in due:
            del self.expected[number]

    @rule()
    def lose_the_cache(self) -> None:
        self.in_flight.clear()
        self.scheduler.requeue_all()
        self.new_epoch()

    def beside(self, step: Step) -> Beside:
        held: list[int] = []
        for number in self.expected:
            held.extend(self.sequences[number][0].block_table)
        owners = [self.sequences[row.seq.key[1]][1] for row in step.rows]
        return Beside(owners, self.answered, np.bincount(held, minlength=self.NUM_BLOCKS))

    @invariant()
    def nothing_contradicts_itself(self) -> None:
        self.scheduler.check_integrity()
        assert {key[1] for key in self.scheduler.open_sequences()} == self.expected.keys()

    def teardown(self) -> None:
        """Everything comes to its end, and to rest."""
        for _ in range(500):
            if len(self.in_flight) < 2:
                self.schedule()
            if not self.in_flight:
                break
            self.answer()
            self.scheduler.check_integrity()
        assert not self.expected, "requests wait for ever"
        assert self.scheduler.num_waiting == self.scheduler.num_running == 0
        assert self.scheduler.blocks.num_free_blocks == self.NUM_BLOCKS


TestBlockManager = BlockManagerMachine.TestCase
TestBlockManager.settings = MANY
TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = MANY
