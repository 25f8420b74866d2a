"""Continuous batching: which sequences, and how many tokens of each, make the next step.

Decisions are plain data (`Step`), applied when the answer comes: `schedule → run → apply`. A step
may be scheduled while the one before is in flight: of the tokens that it will sample it knows the
rows, not the ids. The scheduler knows no clock, no network and no tensor.

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
    """`num_tokens` tokens of `seq` from position `start` on. A row that does not reach the
    sequence's last token is mid-prompt and samples nothing. If the token at `start` is not known
    yet, it is the one that row `previous_row` of the step before samples."""

    seq: Sequence
    start: int
    num_tokens: int
    samples: bool
    previous_row: int | None = None


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
        self._steps_in_flight = 0
        self._fenced: list[Sequence] = []  # ended, their blocks still written by steps in flight

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
        """The next step, or None when there is nothing to do, or nothing before an answer comes.

        Decodes come first, so that streams keep their pace; prompt chunks share what is left of the
        token budget in order of arrival, then waiting sequences are admitted. When a decode finds
        no block, the sequence that arrived last is preempted and will be computed again, but not
        before all steps in flight are answered: they still write its blocks, and may free others.
        """
        preempted = False
        shares: list[tuple[Sequence, int]] = []
        for seq in list(self._running):
            if seq.status is Status.RUNNING and seq.num_unscheduled_tokens == 1:
                if seq.ends_when_answered and seq.num_pending_tokens:
                    continue
                while not self.blocks.append_slot(seq):
                    if self._steps_in_flight:
                        return None
                    preempted = True
                    if self._preempt_last() is seq:
                        break
                else:
                    shares.append((seq, 1))
        budget = self.limits.max_num_batched_tokens - len(shares)
        for seq in self._running:
            if budget and seq.num_unscheduled_tokens > 1:
                shares.append((seq, min(budget, seq.num_unscheduled_tokens)))
                budget -= shares[-1][1]
        while budget and not preempted and (admitted := self._admit(now)):
            shares.append((admitted, min(budget, admitted.num_unscheduled_tokens)))
            budget -= shares[-1][1]
        if not shares:
            return None
        self._steps_in_flight += 1
        self.stats.steps += 1
        self.stats.step_sequences += len(shares)
        self.stats.step_tokens += sum(num_tokens for _, num_tokens in shares)
        return Step([_row(*share, number) for number, share in enumerate(shares)])

    def apply(self, step: Step, token_ids: Seq[int]) -> list[Output]:
        """Takes in the answer to the oldest step in flight: `token_ids[i]` was sampled for row
        i."""
        self._steps_in_flight -= 1
        outputs = []
        for row, token in zip(step.rows, token_ids, strict=True):
            seq = row.seq
            seq.num_steps_in_flight -= 1
            if seq.status is Status.FINISHED:  # meanwhile, its token is dropped
                if not seq.num_steps_in_flight:
                    self._fenced.remove(seq)
                    self.blocks.free(seq)
                continue
            seq.num_computed_tokens += row.num_tokens
            self.blocks.publish(seq)
            if row.samples:
                seq.num_pending_tokens -= 1
                seq.tokens.append(token)
                self.stats.sampled_tokens += 1
                cause = seq.finish_cause()
                if cause:
                    self._end(seq)
                outputs.append(Output(seq, token, seq.num_generated_tokens - 1, cause))
        return outputs

    def fail(self, step: Step, message: str) -> list[Output]:
        """Gives up on the sequences of a step that no worker can run; `requeue_all` follows."""
        outputs = []
        for row in step.rows:
            if row.seq.status is not Status.FINISHED:
                self._end(row.seq)
                outputs.append(Output(row.seq, finished=FinishCause.INTERNAL, message=message))
        return outputs

    def requeue_all(self) -> None:
        """The cache is lost, and with it the steps in flight: everything that ran is computed
        again, in order of arrival."""
        for seq in self._running:
            seq.reset()
        self.stats.preemptions += len(self._running)
        self._waiting.extendleft(reversed(self._running))
        self._running.clear()
        self._fenced.clear()
        self._steps_in_flight = 0
        self.blocks = BlockManager(self.blocks.num_blocks, self.blocks.block_size)

    def check_integrity(self) -> None:
        """Raises AssertionError when blocks or queues contradict each other. For tests."""
        self.blocks.check_integrity([*self._running, *self._fenced])
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

    def _preempt_last(self) -> Sequence:
        seq = self._running.pop()
        self.blocks.free(seq)
        seq.reset()
        self._waiting.appendleft(seq)
        self.stats.preemptions += 1
        return seq

    def _end(self, seq: Sequence) -> None:
        """Takes a sequence out; its blocks wait for the answers of steps that still write them."""
        if seq.status is Status.RUNNING:
            self._running.remove(seq)
            if seq.num_steps_in_flight:
                self._fenced.append(seq)
            else:
                self.blocks.free(seq)
        seq.status = Status.FINISHED
        del self._sequences[seq.key]


def _row(seq: Sequence, num_tokens: int, number: int) -> Row:
    """Row `number` of the step being planned, which counts as scheduled from now on."""
    start = seq.num_scheduled_tokens
    row = Row(
        seq,
        start,
        num_tokens,
        samples=num_tokens == seq.num_unscheduled_tokens,
        previous_row=seq.last_row if start == seq.num_tokens else None,
    )
    seq.num_scheduled_tokens += num_tokens
    seq.num_pending_tokens += row.samples
    seq.num_steps_in_flight += 1
    seq.last_row = number
    return row
