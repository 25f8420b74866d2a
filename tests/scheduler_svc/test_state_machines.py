"""Hypothesis looks for the shortest sequence of calls that breaks the block manager or the
scheduler. It draws the same calls each time; `python -m tests.simulation` draws others."""

from __future__ import annotations

from collections import deque
from contextlib import ExitStack
from dataclasses import replace
from random import Random

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
from scheduler_svc.core.admission import Limits
from scheduler_svc.core.block_manager import BlockManager
from scheduler_svc.core.cache_listener import StoredBlock
from scheduler_svc.core.sampling import SamplingParams
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import FinishCause, Request, Sequence
from scheduler_svc.core.step import Answer, Step
from scheduler_svc.rpc.step_encoding import encode_step, read_answer
from tests import sanitizer
from tests.oracle import VOCAB_SIZE, completion, states
from tests.sanitizer import Beside, Owner, Sanitizer

BLOCK = 2
_MAX_N = 3
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


class SchedulerMachine(RuleBasedStateMachine):
    """Keeps up to two steps in flight; the sanitizer computes their tokens."""

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
        self.in_flight: deque[tuple[Step, Answer]] = deque()
        self.expected: dict[int, list[int]] = {}  # tokens that open requests are still owed
        self.deadlines: dict[int, float] = {}
        self.now = 0.0
        self.sequences: dict[int, tuple[Sequence, Owner]] = {}
        self.number = 0
        self.epoch = 0
        self.new_epoch()

    def key(self, number: int) -> tuple[int, int]:
        return number // _MAX_N % 2, number  # two frontends

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
        min_tokens=st.integers(0, 3),
        has=st.integers(0, 2),
        n=st.integers(1, _MAX_N),
        lasts=st.none() | st.integers(1, 9),
        priority=st.integers(-1, 1),
        salt=st.integers(0, 1),
        logprobs=st.none() | st.integers(0, 2),
    )
    def add(
        self,
        prompt: list[int],
        max_tokens: int,
        ends_at: int,
        min_tokens: int,
        has: int,
        n: int,
        lasts: int | None,
        priority: int,
        salt: int,
        logprobs: int | None,
    ) -> None:
        self.number += _MAX_N
        params = SamplingParams(
            max_tokens,
            eos_token_ids=frozenset(completion(prompt, max_tokens)[ends_at : ends_at + 1]),
            min_tokens=min(min_tokens, max_tokens),
            logprobs=logprobs,
            prompt_logprobs=logprobs,
        )
        tokens = self.tokens_of(prompt, params)
        has = has if n == 1 else 0
        deadline = None if lasts is None else self.now + lasts
        seq = Sequence(
            self.key(self.number),
            prompt,
            params,
            Request(deadline=deadline, priority=priority, cache_salt=str(salt)),
            generated_ids=tokens[:has],
        )
        waits = self.scheduler._waiting.has_any_of(seq.request.client, seq.key.connection)
        room = self.scheduler.num_waiting < self.LIMITS.max_waiting or not waits
        refused = self.scheduler.add(seq, n)
        if len(prompt) + max_tokens > self.LIMITS.max_model_len:
            assert refused
            assert refused.cause is FinishCause.INVALID
        elif refused is None:
            assert room
            for i in range(n):
                self.accepted(self.number + i, prompt, replace(params, seed=i), salt, has)
                if deadline is not None:
                    self.deadlines[self.number + i] = deadline
        else:
            assert refused.cause is FinishCause.QUEUE_FULL if not room else has >= len(tokens)

    def tokens_of(self, prompt: list[int], params: SamplingParams) -> list[int]:
        ends, least = params.eos_token_ids, params.min_tokens
        tokens = completion(prompt, params.max_tokens, params.seed, least, ends)
        found = [i for i, token in enumerate(tokens) if token in ends and i >= least]
        return tokens[: found[0] + 1] if found else tokens

    def accepted(
        self, number: int, prompt: list[int], params: SamplingParams, salt: int, has: int
    ) -> None:
        ends, least = params.eos_token_ids, params.min_tokens
        computed = completion(prompt, params.max_tokens - 1, params.seed, least, ends)
        found = np.array(states(prompt + computed))
        owner = Owner(f"{number}", number, salt, params, prompt, found)
        self.sequences[number] = (self.scheduler._sequences[self.key(number)], owner)
        self.expected[number] = self.tokens_of(prompt, params)[has:]

    @precondition(lambda self: len(self.in_flight) < 2)
    @rule()
    def schedule(self) -> None:
        step = self.scheduler.schedule(self.now)
        if step is None:
            assert self.in_flight or not self.expected, "nothing to do, but requests are open"
            return
        assert all(row.seq.key.number in self.expected for row in step.rows), "one has ended"
        self.step_id += 1
        request = encode_step(step, BLOCK, self.epoch, self.step_id)
        response = self.sanitizer.run(request, self.beside(step))
        self.in_flight.append((step, read_answer(request, response)))

    @precondition(lambda self: self.in_flight)
    @rule()
    def answer(self) -> None:
        outputs = self.scheduler.apply(*self.in_flight.popleft())
        self.answered += 1
        for output in outputs:
            if output.prompt_logprobs is not None:
                assert output.prompt_logprobs.ids.shape[1] == output.seq.params.prompt_logprobs + 1
                continue
            left = self.expected[output.seq.key.number]
            assert output.token == left.pop(0), "wrong token"
            assert (output.finished is not None) == (not left), "ends too early or too late"
            if not left:
                del self.expected[output.seq.key.number]

    @rule(number=st.integers(1 - _MAX_N, 2 * _MAX_N))
    def abort(self, number: int) -> None:
        """Aborts one of the latest, which may have ended."""
        self.scheduler.abort(self.key(self.number - number))
        self.expected.pop(self.number - number, None)

    @rule(seconds=st.integers(1, 4))
    def pass_time(self, seconds: int) -> None:
        self.now += seconds
        due = {n for n in self.expected if self.deadlines.get(n, self.now + 1) <= self.now}
        outputs = self.scheduler.expire(self.now)
        assert {output.seq.key.number for output in outputs} == due
        assert {output.finished for output in outputs} <= {FinishCause.DEADLINE}
        for number in due:
            del self.expected[number]

    @rule()
    def lose_the_cache(self) -> None:
        self.in_flight.clear()
        self.scheduler.requeue_all()
        self.new_epoch()

    @rule(seed=st.integers(0, 9))
    def lose_the_workers(self, seed: int) -> None:
        """Loses the steps in flight, but not the cache."""
        running = self.scheduler.num_running
        self.in_flight.clear()
        self.scheduler.rewind_all()
        assert self.scheduler.num_running == running
        self.epoch += 1
        self.sanitizer.keep(self.epoch, self.answered, Random(seed))
        self.step_id = self.answered = 0

    def beside(self, step: Step) -> Beside:
        held: list[int] = []
        for number in self.expected:
            held.extend(self.sequences[number][0].block_table)
        owners = [self.sequences[row.seq.key.number][1] for row in step.rows]
        return Beside(owners, self.answered, np.bincount(held, minlength=self.NUM_BLOCKS))

    @invariant()
    def nothing_contradicts_itself(self) -> None:
        self.scheduler.check_integrity()
        assert {key.number for key in self.scheduler.open_sequences()} == self.expected.keys()

    def teardown(self) -> None:
        """Runs until every request has ended and all is at rest."""
        for _ in range(500):
            if len(self.in_flight) < 2:
                self.schedule()
            if not self.in_flight:
                break
            self.answer()
            self.scheduler.check_integrity()
        assert not self.expected, "requests wait forever"
        assert self.scheduler.num_waiting == self.scheduler.num_running == 0
        assert self.scheduler.blocks.num_free_blocks == self.NUM_BLOCKS


TestBlockManager = BlockManagerMachine.TestCase
TestBlockManager.settings = MANY
TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = MANY
