"""Continuous batching: which sequences, and how many tokens of each, make the next step.

Decisions are plain data (`Step`), applied when the answer comes: `schedule → run → apply`. The
scheduler knows no clock, no network and no tensor.

    add ──▶ waiting ──schedule──▶ running ──apply──▶ finished
               ▲                     │
               └──────preempted──────┘
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from scheduler_svc.block_manager import BlockManager
from scheduler_svc.sequence import FinishCause, Sequence, SequenceKey, Status


@dataclass(frozen=True)
class Limits:
    """Of a step (`max_num_seqs`, `max_num_batched_tokens`), of a sequence and of the queue."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int  # prompt and completion together, tokens
    max_waiting: int
    vocab_size: int


@dataclass(frozen=True)
class Row:
    """`num_tokens` tokens of `seq`, from `seq.num_computed_tokens` on. A row that does not reach
    the sequence's last token is mid-prompt and samples nothing."""

    seq: Sequence
    num_tokens: int
    samples: bool


@dataclass(frozen=True)
class Step:
    rows: list[Row]


@dataclass(frozen=True)
class Output:
    """News of one sequence: a token and its index in the completion, its end, or both."""

    seq: Sequence
    token: int | None = None
    offset: int = 0
    finished: FinishCause | None = None
    message: str = ""


@dataclass
class Stats:
    """Counted since the start."""

    steps: int = 0
    step_sequences: int = 0
    step_tokens: int = 0
    sampled_tokens: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0


@dataclass
class Scheduler:
    """First come, first served. Every sequence that `add` accepted ends exactly once, either with
    an `Output` that says `finished` or by `abort`."""

    limits: Limits
    blocks: BlockManager
    stats: Stats = field(default_factory=Stats)

    def __post_init__(self) -> None:
        self._sequences: dict[SequenceKey, Sequence] = {}  # all that have not ended
        self._waiting: deque[Sequence] = deque()  # may hold ended ones, skipped when met
        self._running: list[Sequence] = []  # in order of arrival
        self._deadlines: list[tuple[float, int, Sequence]] = []
        self._aborted_in_flight: list[Sequence] = []

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._sequences) - len(self._running)

    def open_sequences(self) -> list[SequenceKey]:
        """Of all sequences that have not ended."""
        return list(self._sequences)

    def add(self, seq: Sequence) -> Output | None:
        """Queues a sequence, or returns its end at once when it cannot be accepted."""
        if refusal := self._refusal(seq):
            seq.status = Status.FINISHED
            return Output(seq, finished=refusal[0], message=refusal[1])
        if cause := seq.finish_cause():  # resubmitted with all its tokens
            seq.status = Status.FINISHED
            return Output(seq, finished=cause)
        self._sequences[seq.key] = seq
        self._waiting.append(seq)
        if seq.deadline is not None:
            heapq.heappush(self._deadlines, (seq.deadline, id(seq), seq))
        return None

    def abort(self, key: SequenceKey) -> None:
        """Ends a sequence without an output; one that has ended already is no error."""
        if seq := self._sequences.get(key):
            self._end(seq)

    def expire(self, now: float) -> list[Output]:
        """Ends the sequences whose deadline is before `now`."""
        outputs = []
        while self._deadlines and self._deadlines[0][0] <= now:
            seq = heapq.heappop(self._deadlines)[2]
            if seq.status is not Status.FINISHED:
                self._end(seq)
                outputs.append(Output(seq, finished=FinishCause.DEADLINE))
        return outputs

    def schedule(self, now: float = 0.0) -> Step | None:
        """The next step, or None when there is nothing to do.

        Decodes come first, so that streams keep their pace; prompt chunks share what is left of the
        token budget in order of arrival, then waiting sequences are admitted. When a decode finds
        no block, the sequence that arrived last is preempted and will be computed again.
        """
        preempted = self._make_room_for_decodes()
        decodes = [Row(s, 1, True) for s in self._running if s.num_uncomputed_tokens == 1]
        budget = self.limits.max_num_batched_tokens - len(decodes)
        chunks: list[Row] = []
        for seq in self._running:
            if budget and seq.num_uncomputed_tokens > 1:
                chunks.append(self._chunk(seq, budget))
                budget -= chunks[-1].num_tokens
        while budget and not preempted and (admitted := self._admit(now)):
            chunks.append(self._chunk(admitted, budget))
            budget -= chunks[-1].num_tokens
        rows = decodes + chunks
        if not rows:
            return None
        for row in rows:
            row.seq.in_flight = True
        self.stats.steps += 1
        self.stats.step_sequences += len(rows)
        self.stats.step_tokens += sum(row.num_tokens for row in rows)
        return Step(rows)

    def apply(self, step: Step, token_ids: Seq[int]) -> list[Output]:
        """Takes in the answer to a step: `token_ids[i]` was sampled for row i."""
        outputs = []
        for row, token in zip(step.rows, token_ids, strict=True):
            seq = row.seq
            seq.in_flight = False
            if seq.status is Status.FINISHED:
                continue  # aborted meanwhile, its token is dropped
            seq.num_computed_tokens += row.num_tokens
            self.blocks.publish(seq)
            if row.samples:
                seq.tokens.append(token)
                self.stats.sampled_tokens += 1
                cause = seq.finish_cause()
                if cause:
                    self._end(seq)
                outputs.append(Output(seq, token, seq.num_generated_tokens - 1, cause))
        for seq in self._aborted_in_flight:
            self.blocks.free(seq)
        self._aborted_in_flight.clear()
        return outputs

    def fail(self, step: Step, message: str) -> list[Output]:
        """Gives up on the sequences of a step that no worker can run."""
        outputs = []
        for row in step.rows:
            row.seq.in_flight = False
            if row.seq.status is not Status.FINISHED:
                self._end(row.seq)
                outputs.append(Output(row.seq, finished=FinishCause.INTERNAL, message=message))
        return outputs

    def requeue_all(self) -> None:
        """The cache is lost: everything that ran is computed again, in order of arrival."""
        for seq in self._running:
            seq.reset()
        self.stats.preemptions += len(self._running)
        self._waiting.extendleft(reversed(self._running))
        self._running.clear()
        self._aborted_in_flight.clear()
        self.blocks = BlockManager(self.blocks.num_blocks, self.blocks.block_size)

    def check_integrity(self) -> None:
        """Raises AssertionError when blocks or queues contradict each other. For tests."""
        self.blocks.check_integrity([*self._running, *self._aborted_in_flight])
        assert all(s.status is Status.RUNNING for s in self._running), "status of the running"
        waiting = [s for s in self._waiting if s.status is not Status.FINISHED]
        assert all(s.status is Status.WAITING and not s.block_table for s in waiting), "waiting"
        assert {id(s) for s in [*self._running, *waiting]} == {
            id(s) for s in self._sequences.values()
        }, "a sequence is in no queue"
        assert len(self._running) + len(waiting) == len(self._sequences), "a sequence is twice"

    def _refusal(self, seq: Sequence) -> tuple[FinishCause, str] | None:
        limits = self.limits
        if seq.num_prompt_tokens == 0:
            return FinishCause.INVALID, "prompt: is empty"
        if not all(0 <= token < limits.vocab_size for token in seq.tokens):
            return FinishCause.INVALID, f"prompt: token ids must be below {limits.vocab_size}"
        if seq.params.max_tokens <= 0:
            return FinishCause.INVALID, "sampling.max_tokens: must be at least 1"
        if seq.num_prompt_tokens + seq.params.max_tokens > limits.max_model_len:
            return FinishCause.INVALID, (
                f"sampling.max_tokens: a prompt of {seq.num_prompt_tokens} tokens and "
                f"{seq.params.max_tokens} more exceed the limit of {limits.max_model_len}"
            )
        if seq.key in self._sequences:
            return FinishCause.INVALID, "request: its number is in use"
        if self.num_waiting >= limits.max_waiting:
            return FinishCause.QUEUE_FULL, f"{limits.max_waiting} requests are waiting already"
        return None

    def _make_room_for_decodes(self) -> bool:
        """Whether anything had to be preempted."""
        preempted = False
        for seq in list(self._running):
            while seq.status is Status.RUNNING and seq.num_uncomputed_tokens == 1:
                if self.blocks.append_slot(seq):
                    break
                self._preempt(self._running[-1])
                preempted = True
        return preempted

    def _admit(self, now: float) -> Sequence | None:
        while self._waiting and self._waiting[0].status is Status.FINISHED:
            self._waiting.popleft()
        if not self._waiting or len(self._running) >= self.limits.max_num_seqs:
            return None
        seq = self._waiting[0]
        if not self.blocks.allocate_prompt(seq):
            return None
        self._waiting.popleft()
        if seq.first_scheduled is None:
            seq.first_scheduled = now
            seq.num_cached_prompt_tokens = min(seq.num_computed_tokens, seq.num_prompt_tokens)
            self.stats.prompt_tokens += seq.num_prompt_tokens
            self.stats.cached_prompt_tokens += seq.num_cached_prompt_tokens
        seq.status = Status.RUNNING
        self._running.append(seq)
        return seq

    def _chunk(self, seq: Sequence, budget: int) -> Row:
        num_tokens = min(budget, seq.num_uncomputed_tokens)
        return Row(seq, num_tokens, samples=num_tokens == seq.num_uncomputed_tokens)

    def _preempt(self, seq: Sequence) -> None:
        self._running.remove(seq)
        self.blocks.free(seq)
        seq.reset()
        self._waiting.appendleft(seq)
        self.stats.preemptions += 1

    def _end(self, seq: Sequence) -> None:
        """Takes a sequence out; its blocks wait for the answer while a step still writes them."""
        if seq.status is Status.RUNNING:
            self._running.remove(seq)
            if seq.in_flight:
                self._aborted_in_flight.append(seq)
            else:
                self.blocks.free(seq)
        seq.status = Status.FINISHED
        del self._sequences[seq.key]
