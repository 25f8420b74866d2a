"""Continuous batching: which sequences, and how many tokens of each, make the next step.

Decisions are plain data (`Step`), applied when the answer comes: `schedule → run → apply`. A step
may be scheduled while the one before is in flight: of the tokens that it will sample it knows the
rows, not the ids. The scheduler knows no clock, no network and no tensor.

    add ──▶ waiting ──schedule──▶ running ──apply──▶ finished
     │         ▲                   ▲ │
     │         └────── preempted ──│─┘
     └─▶ following, until the prompt that it shares is computed ──fork──▶ running or waiting

Sequences that share a prompt, and the beams of a search, are looked after in `forks/`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import chain, count
from math import inf
from operator import attrgetter

from scheduler_svc.core.admission import Limits, refusal
from scheduler_svc.core.block_manager import BlockManager
from scheduler_svc.core.budgets import Budgets
from scheduler_svc.core.client import Client
from scheduler_svc.core.forks.beams import Advance
from scheduler_svc.core.forks.forks import Forks
from scheduler_svc.core.lazy_heap import LazyHeap
from scheduler_svc.core.pace import Pace, PromptBudget
from scheduler_svc.core.sequence import FinishCause, Sequence, SequenceKey, Started, Status
from scheduler_svc.core.step import Answer, End, Output, Row, Step, take_prompt_logprobs
from scheduler_svc.core.waiting_queue import WaitingQueue

_SHARED_S = 10.0  # after which a client is alone that others no longer send anything beside

_line_of = attrgetter("seq.line")
_rank_of = attrgetter("rank")


@dataclass
class Stats:
    """Counters since the start."""

    steps: int = 0
    step_sequences: int = 0
    step_tokens: int = 0
    sampled_tokens: int = 0
    admissions: int = 0  # preempted sequences count each time
    preemptions: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0


class Scheduler:
    """Plans steps and applies their answers. Every sequence that `add` accepts ends exactly once,
    with an `Output` that carries its `end`, or silently by `abort`."""

    def __init__(self, limits: Limits, blocks: BlockManager) -> None:
        self.limits = limits
        self.blocks = blocks
        self.stats = Stats()
        self.pace = Pace()
        self.clients_have_names = False  # those of some frontend that has been connected
        self._sequences: dict[SequenceKey, Sequence] = {}  # all that have not ended
        self._budgets = Budgets()
        self._now = 0.0  # when a step was last scheduled
        self._shared_until = 0.0
        self._waiting = WaitingQueue(_prefill_budget(limits, num_decodes=1) // 2)
        self._running: dict[Sequence, None] = {}  # in order of admission
        self._num_featured = 0  # of the running, those whose rows may need feature columns
        self._forks = Forks()
        self._deadlines: LazyHeap[float, Sequence] = LazyHeap(
            lambda seq, _: seq.status is not Status.FINISHED
        )
        self._deadline_numbers = count()
        self._last_step = self._last_answered = 0
        # Ended sequences by the last step in flight that still writes their blocks.
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

    @property
    def num_uncached_tokens(self) -> int:
        """Tokens of prompts that are expected to be computed, of sequences waiting and running."""
        running = (seq.num_unscheduled_tokens for seq in self._running)
        return self._waiting.num_uncached_tokens + sum(count for count in running if count > 1)

    @property
    def is_full(self) -> bool:
        """Whether a sequence that came now would wait for another to end."""
        short = self.num_waiting > 0 and self.blocks.num_free_blocks < self.blocks.num_blocks // 16
        return self.num_running >= self.limits.max_num_seqs or short

    def prompt_token_s(self) -> float:
        """Seconds that a prompt's token takes, with its share of the decodes in its step; 0 if that
        is not known."""
        decodes_s, token_s = self.pace.decodes_s(self.num_running), self.pace.prompt_token_s
        return token_s and token_s + decodes_s / self.limits.max_num_prefill_tokens

    def open_sequences(self) -> list[SequenceKey]:
        """The keys of all sequences that have not ended."""
        return list(self._sequences)

    def add(self, seq: Sequence, n: int = 1) -> End | None:
        """Queues a sequence, or returns its end if it cannot be accepted. The other n - 1
        completions of its prompt, numbered and seeded from it onwards, are accepted or refused
        with it."""
        end = self.refusal(seq, n)
        if end is None and (cause := seq.finish_cause()):  # resubmitted with all its tokens
            end = End(cause)
        if end is not None:
            seq.status = Status.FINISHED
            return end
        request = seq.request
        if not request.resubmitted:
            self._budgets.charge_input(request.client, seq.num_tokens, request.arrival)
        self._waiting.push(seq)
        self._open(seq)
        followers = self._forks.add(seq, n)
        if seq.params.beam_width:
            self.release(seq)
        for follower in followers:
            self._waiting.arrive(follower)
            self._open(follower)
        return None

    def refusal(self, seq: Sequence, n: int = 1) -> End | None:
        """The reason that `add` would give for refusing a sequence now, or None."""
        connection, number = seq.key
        shares = self.shares_queue(seq.request.client)
        if end := refusal(seq, n, self.limits, self._waiting, self._budgets, shares=shares):
            return end
        for i in range(max(n, seq.params.beam_width)):
            key = SequenceKey(connection, number + i)
            if key in self._sequences or self._forks.may_claim(key):
                return End(FinishCause.INVALID, "request: its number is in use")
        return None

    def shares_queue(self, client: Client) -> bool:
        """Whether a client must leave room in the queue for others. Callers without a name need not
        where nobody has one."""
        return bool(client.name) or self.clients_have_names

    def followers(self, seq: Sequence) -> list[Sequence]:
        """The other completions of a sequence's prompt that are still waiting for it."""
        return self._forks.followers_of(seq)

    def abort(self, key: SequenceKey) -> None:
        """Ends a sequence, or all beams of its search, without an output. It may have ended
        already."""
        if seq := self._sequences.get(key):
            self._close_all_of(seq)

    def expire(self, now: float) -> list[Output]:
        """Ends the sequences whose deadline has passed at `now`."""
        outputs: list[Output] = []
        while (first := self._deadlines.peek()) and first[0] <= now:
            outputs += self.end(first[1], FinishCause.DEADLINE)
        return outputs

    def end(self, seq: Sequence, cause: FinishCause, message: str = "") -> list[Output]:
        """Ends a sequence, or all beams of its search, early."""
        outputs = self._forks.ends(seq, End(cause, message))
        self._close_all_of(seq)
        return outputs

    def release(self, seq: Sequence, mask: bytes | None = None) -> None:
        """Lets a held sequence sample its next token, one that `mask` allows: uint32[ceil(vocab /
        32)], lowest bit first. It may have ended in the meantime."""
        if seq.status is not Status.FINISHED:
            assert seq.held, "was not held"
            assert seq.features is not None
            seq.held = False
            seq.features.mask = mask
            seq.num_unscheduled_tokens += 1

    def schedule(self, now: float = 0.0) -> Step | None:
        """Plans the next step, or returns None if there is nothing to do until an answer comes.

        Decodes come first, so that streams keep their pace; `_schedule_prompts` gives out what is
        left of the token budget. When decodes find too few blocks, running sequences are
        preempted, from the lowest priority and latest arrival on, and will be computed again; but
        not before all steps in flight are answered: they still write those blocks, and may free
        others.
        """
        self._now = now
        decodes: list[Sequence] = []
        prompts: list[Sequence] = []
        for seq in self._running:
            if seq.num_unscheduled_tokens > 1:
                prompts.append(seq)
            elif seq.num_unscheduled_tokens:  # else it ends when a step in flight is answered
                decodes.append(seq)
        is_shared = self._is_shared()
        if decodes and is_shared:
            decodes = self.pace.fitting(decodes)
        size = self.blocks.block_size
        # Those that need a block.
        full = [seq for seq in decodes if seq.num_scheduled_tokens == len(seq.block_table) * size]

        crowded = len(full) > self.blocks.num_free_blocks
        if crowded and self._last_answered < self._last_step:
            return None
        while len(full) > self.blocks.num_free_blocks:
            preempted = self._preempt_last(self._running)
            for queue in (decodes, prompts, full):
                if preempted in queue:
                    queue.remove(preempted)
        for seq in full:
            self.blocks.append_slot(seq)

        number = self._last_step + 1
        rows = [_schedule_row(seq, 1, number, i) for i, seq in enumerate(decodes)]
        seconds = self.pace.seconds_for_prompts(len(rows)) if is_shared else inf
        budget = PromptBudget(self.pace, _prefill_budget(self.limits, len(rows)), seconds)
        for seq, num_tokens in self._schedule_prompts(budget, prompts, now, may_admit=not crowded):
            if num_tokens:
                rows.append(_schedule_row(seq, num_tokens, number, len(rows)))
        if not rows:
            return self.schedule(now) if self._give_way() else None
        self._last_step = number
        self.stats.steps += 1
        self.stats.step_sequences += len(rows)
        num_tokens = sum(row.num_tokens for row in rows)
        self.stats.step_tokens += num_tokens
        copies, has_features = self.blocks.take_copies(), self._num_featured > 0
        return Step(number, rows, copies, has_features, len(decodes), num_tokens)

    def apply(self, step: Step, answer: Answer) -> list[Output]:
        """Applies the answer to the oldest step in flight, and returns the news."""
        self._last_answered = step.number
        block_size, finished = self.blocks.block_size, Status.FINISHED
        scored = [*take_prompt_logprobs(step, answer)] if answer.prompt_logprobs else []
        for row, child in self._forks.prompts_computed(step):
            row.seq.num_computed_tokens = row.start + row.num_tokens
            self._fork(row.seq, child)
        beams = self._forks.beams or ()  # the usual case: nothing to hash a sequence for
        outputs: list[Output] = []
        for row, token in zip(step.rows, answer.token_ids, strict=True):
            seq = row.seq
            if seq.status is finished:  # meanwhile; its token is dropped
                continue
            computed = seq.num_computed_tokens = row.start + row.num_tokens
            if computed >= (seq.num_published_blocks + 1) * block_size:
                self.blocks.publish(seq)
            if row.samples and seq not in beams:
                seq.tokens.append(token)
                end = None
                params = seq.params
                if (
                    computed == seq.max_scheduled_tokens
                    or token in params.eos_token_ids
                    or token in params.stop_token_ids
                ):
                    cause = seq.finish_cause()
                    assert cause is not None
                    end = End(cause)
                    self._close(seq)
                outputs.append(Output(seq, token, computed - seq.num_prompt_tokens, end))
        if self._waiting.num_lines > 1 or self._budgets:
            self._charge(step, outputs)
        for seq in self._fenced.pop(step.number, ()):
            self.blocks.free(seq)
        self.stats.sampled_tokens += len(outputs)
        if self._num_featured:
            for output in outputs:
                output.seq.held = output.seq.params.stepwise
        if answer.logprobs:
            found = {step.rows[row].seq: logprobs for row, logprobs in answer.logprobs.items()}
            for output in outputs:
                output.logprobs = found.get(output.seq)
            for advance in self._forks.advance_beams(found):
                self._advance_beams(advance)
                outputs += advance.outputs
        return scored + outputs if scored else outputs

    def fail(self, seq: Sequence, message: str) -> list[Output]:
        """Gives up on a sequence that no worker can run, and on its followers. Call `requeue_all`
        next."""
        outputs: list[Output] = []
        for each in (*self.followers(seq), seq):
            outputs += self.end(each, FinishCause.INTERNAL, message)
        return outputs

    def restrict(self, only: Seq[Sequence] | None) -> None:
        """Schedules only these sequences from now on, or all again if None. Preempts any others
        that run, so no step may be in flight."""
        self._waiting.only = only
        if only is not None:
            for seq in [seq for seq in self._running if seq not in only]:
                self._preempt(seq)

    def requeue_all(self) -> None:
        """Recovers from the loss of the cache and of the steps in flight: every running sequence is
        computed again, ahead of those that wait with the same priority."""
        for seq in self._running:
            self._queue_again(seq)
        self.stats.preemptions += len(self._running)
        self._running.clear()
        self._num_featured = 0
        self._fenced.clear()
        self._last_answered = self._last_step
        self.blocks.reset()

    def check_integrity(self) -> None:
        """Raises AssertionError if blocks or queues contradict each other. For tests."""
        self.blocks.check_integrity([*self._running, *chain(*self._fenced.values())])
        self._waiting.check_integrity(self._sequences.values())
        assert all(s.status is Status.RUNNING for s in self._running), "status of the running"
        featured = sum(s.features is not None for s in self._running)
        assert featured == self._num_featured, "rows with features"
        waiting = [s for s in self._sequences.values() if s in self._waiting]
        assert len(waiting) == self.num_waiting, "an ended sequence waits"
        assert all(s.status is Status.WAITING and not s.block_table for s in waiting), "waiting"
        self._forks.check_integrity(len(self._sequences) - len(self._running) - len(waiting))

    def _advance_beams(self, advance: Advance) -> None:
        for seq in advance.dropped:  # first: the others' children take over their numbers
            self._close(seq)
        for parent, child in advance.forks:
            self._open(child)
            self._fork(parent, child)
        for seq, token in advance.kept:
            seq.tokens.append(token)
            self.release(seq)
            if seq.status is Status.PARKED:
                self._forks.remove(seq)
                self._queue_again(seq)

    def _open(self, seq: Sequence) -> None:
        self._sequences[seq.key] = seq
        self._waiting.open(seq)
        if seq.request.deadline is not None:
            self._deadlines.push(seq.request.deadline, next(self._deadline_numbers), seq)

    def _close(self, seq: Sequence) -> None:
        """Takes a sequence out. Its blocks are freed once no step in flight still writes them."""
        if seq.status is Status.WAITING:
            self._waiting.remove(seq)
        elif seq.status is Status.RUNNING:
            self._leave(seq)
            if seq.last_step > self._last_answered:
                self._fenced.setdefault(seq.last_step, []).append(seq)
            else:
                self.blocks.free(seq)
        else:
            self._forks.remove(seq)
        self._waiting.close(seq)
        seq.status = Status.FINISHED
        del self._sequences[seq.key]
        if leader := self._forks.closed(seq):
            self._queue_again(leader)

    def _fork(self, parent: Sequence, child: Sequence) -> None:
        """Lets a sequence run on what its parent has computed. If it finds no slot or no blocks, it
        waits as preempted ones do, and later finds the prompt in the prefix cache."""
        may_run = parent.status is Status.RUNNING and len(self._running) < self.limits.max_num_seqs
        if may_run and self.blocks.fork(parent, child):
            assert parent.started is not None
            self._run(child, parent.started.at)
        else:
            self._queue_again(child)

    def _queue_again(self, seq: Sequence) -> None:
        seq.reset()
        if self._forks.is_idle(seq):
            self._forks.park(seq)
        else:
            self._waiting.push(seq)

    def _charge(self, step: Step, outputs: list[Output]) -> None:
        """Counts a step's tokens, and those sampled for beams, as their clients'. What one alone
        has had need not be counted, unless it has a budget."""
        sampled = Counter(map(_line_of, outputs))
        if beams := self._forks.beams:
            sampled.update(row.seq.line for row in step.rows if row.samples and row.seq in beams)
        for line, num_tokens in sampled.items():
            line.add_output(num_tokens)
            self._budgets.charge_output(line.client, num_tokens, self._now)

    def _is_shared(self) -> bool:
        """Whether several clients have sequences, or had a moment ago and may soon again."""
        if self._waiting.num_clients > 1:
            self._shared_until = self._now + _SHARED_S
        return self._now < self._shared_until

    def _schedule_prompts(
        self, budget: PromptBudget, prompts: list[Sequence], now: float, *, may_admit: bool
    ) -> Iterator[tuple[Sequence, int]]:
        """Admits waiting sequences and shares out `budget` to them and to `prompts`.

        Short prompts come first, in half of the budget, so that they do not queue behind a long
        one's chunks; then everything goes in order, one long prompt after another.
        """
        short = budget.half()
        rest = []
        for seq in prompts:
            if short.holds(seq):
                yield seq, short.take(seq)
            else:
                rest.append(seq)
        while may_admit and (waiting := self._next_short(short)) and self._admit(waiting, now):
            yield waiting, short.take(waiting)
        for seq in rest:
            yield seq, budget.take(seq)
        while may_admit and (waiting := self._waiting.peek()) and budget.holds_part(waiting):
            if not self._admit(waiting, now):
                break
            yield waiting, budget.take(waiting)

    def _next_short(self, budget: PromptBudget) -> Sequence | None:
        """A waiting sequence that fits into `budget` and may go now: the next in line, or one that
        takes nothing the next in line needs."""
        seq, first = self._waiting.peek_short(), self._waiting.peek()
        if seq is None or not budget.holds(seq) or first is None:
            return None
        num_blocks = self.blocks.blocks_for(seq.num_tokens) + self.blocks.blocks_for(
            first.num_tokens
        )
        fits_beside = (
            num_blocks <= self.blocks.num_free_blocks
            and len(self._running) + 2 <= self.limits.max_num_seqs
            and self._waiting.may_overtake(seq, first)
        )
        return seq if seq is first or fits_beside else None

    def _admit(self, seq: Sequence, now: float) -> bool:
        """Lets a waiting sequence run if there are blocks for it."""
        if len(self._running) >= self.limits.max_num_seqs or not self.blocks.allocate_prompt(seq):
            return False
        self._waiting.admit(seq)
        self.stats.admissions += 1
        self._run(seq, now)
        return True

    def _run(self, seq: Sequence, now: float) -> None:
        """Starts a sequence that has been given its blocks."""
        if seq.started is None:
            num_cached = min(seq.num_computed_tokens, seq.num_prompt_tokens)
            seq.started = Started(now, num_cached)
            self.stats.prompt_tokens += seq.num_prompt_tokens
            self.stats.cached_prompt_tokens += num_cached
        seq.status = Status.RUNNING
        self._running[seq] = None
        self._num_featured += seq.features is not None

    def _leave(self, seq: Sequence) -> None:
        """Stops running a sequence."""
        del self._running[seq]
        self._num_featured -= seq.features is not None

    def _give_way(self) -> bool:
        """Resolves a deadlock, in which idle beams hold the blocks that others need, by preempting
        one of them. False if there is none."""
        if self._last_answered < self._last_step or not self._waiting:
            return False
        idle = [seq for seq in self._running if self._forks.is_idle(seq)]
        if not idle:
            return False
        self._preempt_last(idle)
        return True

    def _preempt_last(self, among: Iterable[Sequence]) -> Sequence:
        """Sends the running sequence of the lowest priority and latest arrival back to wait."""
        seq = max(among, key=_rank_of)
        self._preempt(seq)
        return seq

    def _preempt(self, seq: Sequence) -> None:
        self._leave(seq)
        self.blocks.free(seq)
        self._queue_again(seq)
        self.stats.preemptions += 1

    def _close_all_of(self, seq: Sequence) -> None:
        for each in self._forks.all_of(seq):
            self._close(each)


def _prefill_budget(limits: Limits, num_decodes: int) -> int:
    """The prompt tokens that fit a step with `num_decodes` decodes."""
    budget = limits.max_num_batched_tokens - num_decodes
    return min(budget, limits.max_num_prefill_tokens) if num_decodes else budget


def _schedule_row(seq: Sequence, num_tokens: int, step: int, index: int) -> Row:
    """Schedules a sequence's next tokens as row `index` of a step."""
    start = seq.num_scheduled_tokens
    previous_row = seq.last_row if start == len(seq.tokens) else None
    end = seq.num_scheduled_tokens = start + num_tokens
    seq.last_step, seq.last_row = step, index
    samples = False
    left = seq.num_unscheduled_tokens - num_tokens
    if not left:  # after the last one comes the one that it samples, if that may be computed
        samples = not seq.held
        if end < seq.max_scheduled_tokens and not (seq.features and seq.params.stepwise):
            left = 1
    seq.num_unscheduled_tokens = left
    return Row(seq, start, num_tokens, samples, previous_row)
