"""Continuous batching: which sequences, and how many tokens of each, make the next step.

Decisions are plain data (`Step`), applied when the answer comes: `schedule → run → apply`. A step
may be scheduled while the one before is in flight: of the tokens that it will sample it knows the
rows, not the ids. The scheduler knows no clock, no network and no tensor.

    add ──▶ waiting ──schedule──▶ running ──apply──▶ finished
               ▲                     │
               └──────preempted──────┘
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import chain

from scheduler_svc.admission import Limits, refusal
from scheduler_svc.block_manager import BlockManager
from scheduler_svc.lazy_heap import LazyHeap
from scheduler_svc.sequence import FinishCause, Sequence, SequenceKey, Status
from scheduler_svc.waiting_queue import WaitingQueue


# Not frozen: that would make each several times as expensive, and a step makes two per sequence.
@dataclass(slots=True, eq=False)
class Row:
    """`num_tokens` tokens of `seq` from position `start` on. A row that does not reach the
    sequence's last token is mid-prompt and samples nothing. If the token at `start` is not known
    yet, it is the one that row `previous_row` of the step before samples."""

    seq: Sequence
    start: int
    num_tokens: int
    samples: bool
    previous_row: int | None = None


@dataclass(slots=True, eq=False)
class Step:
    number: int  # 1, 2, 3, ...
    rows: list[Row]


@dataclass(slots=True, eq=False)
class Output:
    """News of one sequence: a token and its index in the completion, its end, or both."""

    seq: Sequence
    token: int | None = None
    offset: int = 0
    finished: FinishCause | None = None
    message: str = ""
    retry_after_s: float = 0.0  # with QUEUE_FULL


@dataclass
class Stats:
    """Counted since the start."""

    steps: int = 0
    step_sequences: int = 0
    step_tokens: int = 0
    sampled_tokens: int = 0
    admissions: int = 0  # preempted sequences count each time
    preemptions: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0


@dataclass
class Scheduler:
    """Every sequence that `add` accepted ends exactly once, either with an `Output` that says
    `finished` or by `abort`."""

    limits: Limits
    blocks: BlockManager
    stats: Stats = field(default_factory=Stats)

    def __post_init__(self) -> None:
        self._sequences: dict[SequenceKey, Sequence] = {}  # all that have not ended
        self._waiting = WaitingQueue(_prefill_budget(self.limits, num_decodes=1) // 2)
        self._running: dict[Sequence, None] = {}  # in order of admission
        self._deadlines: LazyHeap[float] = LazyHeap(lambda s, _: s.status is not Status.FINISHED)
        self._last_step = self._last_answered = 0
        # Ended, their blocks still written by steps in flight: by the last of these.
        self._fenced: dict[int, list[Sequence]] = {}

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_waiting_tokens(self) -> int:
        return self._waiting.num_tokens

    def open_sequences(self) -> list[SequenceKey]:
        """Of all sequences that have not ended."""
        return list(self._sequences)

    def add(self, seq: Sequence) -> Output | None:
        """Queues a sequence, or returns its end at once when it cannot be accepted."""
        refused = refusal(seq, self.limits, self._waiting)
        if seq.key in self._sequences:
            refused = FinishCause.INVALID, "request: its number is in use"
        if refused:
            seq.status = Status.FINISHED
            return Output(seq, finished=refused[0], message=refused[1])
        if cause := seq.finish_cause():  # resubmitted with all its tokens
            seq.status = Status.FINISHED
            return Output(seq, finished=cause)
        self._sequences[seq.key] = seq
        self._waiting.push(seq)
        if seq.deadline is not None:
            self._deadlines.push(seq.deadline, seq.arrival_number, seq)
        return None

    def abort(self, key: SequenceKey) -> None:
        """Ends a sequence without an output; one that has ended already is no error."""
        if seq := self._sequences.get(key):
            self._end(seq)

    def expire(self, now: float) -> list[Output]:
        """Ends the sequences whose deadline is not after `now`."""
        outputs = []
        while (first := self._deadlines.peek()) and first[0] <= now:
            self._end(first[1])
            outputs.append(Output(first[1], finished=FinishCause.DEADLINE))
        return outputs

    def schedule(self, now: float = 0.0) -> Step | None:
        """The next step, or None when there is nothing to do, or nothing before an answer comes.

        Decodes come first, so that streams keep their pace; `_share` says who gets what is left of
        the token budget. When decodes find too few blocks, running sequences are preempted, from
        the lowest priority and latest arrival on, and will be computed again; but not before all
        steps in flight are answered: they still write those blocks, and may free others.
        """
        decodes: list[Sequence] = []
        prompts: list[Sequence] = []
        full: list[Sequence] = []  # decodes that need a block
        block_size = self.blocks.block_size
        for seq in self._running:
            if seq.num_unscheduled_tokens > 1:
                prompts.append(seq)
            elif seq.num_unscheduled_tokens:  # else it ends when a step in flight is answered
                decodes.append(seq)
                if seq.num_scheduled_tokens == len(seq.block_table) * block_size:
                    full.append(seq)

        crowded = len(full) > self.blocks.num_free_blocks
        if crowded and self._last_answered < self._last_step:
            return None
        while len(full) > self.blocks.num_free_blocks:
            preempted = self._preempt_last()
            for queue in (decodes, prompts, full):
                if preempted in queue:
                    queue.remove(preempted)
        for seq in full:
            self.blocks.append_slot(seq)

        number = self._last_step + 1
        rows = [_row(seq, 1, number, i) for i, seq in enumerate(decodes)]
        budget = _prefill_budget(self.limits, len(rows))
        for seq, num_tokens in self._share(budget, prompts, now, may_admit=not crowded):
            rows.append(_row(seq, num_tokens, number, len(rows)))
        if not rows:
            return None
        self._last_step = number
        self.stats.steps += 1
        self.stats.step_sequences += len(rows)
        self.stats.step_tokens += sum(row.num_tokens for row in rows)
        return Step(number, rows)

    def apply(self, step: Step, token_ids: Seq[int]) -> list[Output]:
        """Takes in the answer to the oldest step in flight: `token_ids[i]` was sampled for row
        i."""
        self._last_answered = step.number
        block_size, finished = self.blocks.block_size, Status.FINISHED
        outputs = []
        for row, token in zip(step.rows, token_ids, strict=True):
            seq = row.seq
            if seq.status is finished:  # meanwhile; its token is dropped
                continue
            computed = seq.num_computed_tokens = row.start + row.num_tokens
            if computed >= (seq.num_published_blocks + 1) * block_size:
                self.blocks.publish(seq)
            if row.samples:
                seq.tokens.append(token)
                cause = None
                if token in seq.end_token_ids or computed == seq.max_scheduled_tokens:
                    cause = seq.finish_cause()
                    self._end(seq)
                outputs.append(Output(seq, token, computed - seq.num_prompt_tokens, cause))
        for seq in self._fenced.pop(step.number, ()):
            self.blocks.free(seq)
        self.stats.sampled_tokens += len(outputs)
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
        again, before anything that waits with the same priority."""
        for seq in self._running:
            seq.reset()
            self._waiting.push(seq)
        self.stats.preemptions += len(self._running)
        self._running.clear()
        self._fenced.clear()
        self._last_answered = self._last_step
        self.blocks.reset()

    def check_integrity(self) -> None:
        """Raises AssertionError when blocks or queues contradict each other. For tests."""
        self.blocks.check_integrity([*self._running, *chain(*self._fenced.values())])
        self._waiting.check_integrity()
        assert all(s.status is Status.RUNNING for s in self._running), "status of the running"
        waiting = [s for s in self._sequences.values() if s in self._waiting]
        assert len(waiting) == self.num_waiting, "an ended sequence waits"
        assert all(s.status is Status.WAITING and not s.block_table for s in waiting), "waiting"
        assert len(self._running) + len(waiting) == len(self._sequences), "in no queue, or in two"

    def _share(
        self, budget: int, prompts: list[Sequence], now: float, *, may_admit: bool
    ) -> Iterator[tuple[Sequence, int]]:
        """Shares `budget` tokens among `prompts` and waiting sequences, which this admits.

        Short prompts come first, in half of the budget, so that they do not queue behind a long
        one's chunks; then everything goes in order, one long prompt after another.
        """
        short = budget // 2
        rest = []
        for seq in prompts:
            num_tokens = seq.num_unscheduled_tokens
            if num_tokens <= short:
                short -= num_tokens
                budget -= num_tokens
                yield seq, num_tokens
            else:
                rest.append(seq)
        while may_admit and (waiting := self._next_short(short)) and self._admit(waiting, now):
            num_tokens = waiting.num_unscheduled_tokens
            short -= num_tokens
            budget -= num_tokens
            yield waiting, num_tokens
        for seq in rest:
            if num_tokens := min(budget, seq.num_unscheduled_tokens):
                budget -= num_tokens
                yield seq, num_tokens
        while may_admit and budget and (waiting := self._waiting.peek()):
            if not self._admit(waiting, now):
                break
            num_tokens = min(budget, waiting.num_unscheduled_tokens)
            budget -= num_tokens
            yield waiting, num_tokens

    def _next_short(self, max_tokens: int) -> Sequence | None:
        """A waiting sequence of at most `max_tokens` that may go now: the next one, or another if
        it takes nothing that the next one needs."""
        seq, first = self._waiting.peek_short(), self._waiting.peek()
        if seq is None or seq.num_tokens > max_tokens or first is None:
            return None
        num_blocks = self.blocks.blocks_for(seq.num_tokens) + self.blocks.blocks_for(
            first.num_tokens
        )
        fits_beside = (
            num_blocks <= self.blocks.num_free_blocks
            and len(self._running) + 2 <= self.limits.max_num_seqs
        )
        return seq if seq is first or fits_beside else None

    def _admit(self, seq: Sequence, now: float) -> bool:
        """Lets a waiting sequence run, if there are blocks for it."""
        if len(self._running) >= self.limits.max_num_seqs or not self.blocks.allocate_prompt(seq):
            return False
        self._waiting.admit(seq)
        self.stats.admissions += 1
        if seq.first_scheduled is None:
            seq.first_scheduled = now
            seq.num_cached_prompt_tokens = min(seq.num_computed_tokens, seq.num_prompt_tokens)
            self.stats.prompt_tokens += seq.num_prompt_tokens
            self.stats.cached_prompt_tokens += seq.num_cached_prompt_tokens
        seq.status = Status.RUNNING
        self._running[seq] = None
        return True

    def _preempt_last(self) -> Sequence:
        """Sends the running sequence of the lowest priority and latest arrival back to wait."""
        seq = max(self._running, key=lambda s: (s.priority, s.arrival_number))
        del self._running[seq]
        self.blocks.free(seq)
        seq.reset()
        self._waiting.push(seq)
        self.stats.preemptions += 1
        return seq

    def _end(self, seq: Sequence) -> None:
        """Takes a sequence out; its blocks wait for the answers of steps that still write them."""
        if seq.status is Status.WAITING:
            self._waiting.remove(seq)
        else:
            del self._running[seq]
            if seq.last_step > self._last_answered:
                self._fenced.setdefault(seq.last_step, []).append(seq)
            else:
                self.blocks.free(seq)
        seq.status = Status.FINISHED
        del self._sequences[seq.key]


def _prefill_budget(limits: Limits, num_decodes: int) -> int:
    """Prompt tokens in a step with `num_decodes` decodes."""
    budget = limits.max_num_batched_tokens - num_decodes
    return min(budget, limits.max_num_prefill_tokens) if num_decodes else budget


def _row(seq: Sequence, num_tokens: int, step: int, index: int) -> Row:
    """Row `index` of the step being planned, which counts as scheduled from now on."""
    start = seq.num_scheduled_tokens
    previous_row = seq.last_row if start == len(seq.tokens) else None
    end = seq.num_scheduled_tokens = start + num_tokens
    seq.last_step, seq.last_row = step, index
    left = seq.num_unscheduled_tokens - num_tokens
    # After the last one comes the one that it samples, unless that is not to be computed any more.
    seq.num_unscheduled_tokens = left or (1 if end < seq.max_scheduled_tokens else 0)
    return Row(seq, start, num_tokens, not left, previous_row)
