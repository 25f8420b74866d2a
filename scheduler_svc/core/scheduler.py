"""Continuous batching: chooses the sequences of the next step, and how many tokens of each.

Decisions are plain data (`Step`), applied when the answer arrives: `schedule → run → apply`. A step
may be scheduled while the previous step is in flight. Of the tokens that the previous step will
sample, only the rows are known then. A step with drafted tokens is answered before the next step is
scheduled, because nobody knows how many of its tokens will hold. The scheduler knows no clock, no
network and no tensor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from operator import attrgetter

from scheduler_svc.core.admission import Limits, refusal
from scheduler_svc.core.blocks.block_manager import BlockManager
from scheduler_svc.core.budgets import INPUT, OUTPUT, Budgets
from scheduler_svc.core.open_sequences import OpenSequences
from scheduler_svc.core.planning.prompt_budget import PromptBudget, PromptBudgets
from scheduler_svc.core.planning.speculation import Speculation
from scheduler_svc.core.planning.step_times import StepTimes
from scheduler_svc.core.sequence import FinishCause, Row, Sequence, SequenceKey, Status
from scheduler_svc.core.step import Answer, End, Output, Step, add_embeddings, take_prompt_logprobs
from scheduler_svc.core.swaps import Swaps
from scheduler_svc.core.waiting_queue import WaitingQueue

_SHORT_PART = 0.5  # of the prompts' budget in a step, for prompts that fit into this part

_rank_of, _usage_of = attrgetter("rank"), attrgetter("seq.usage")


class Scheduler:
    """Plans steps and applies their answers. Every sequence that `add` accepts ends exactly once,
    with an `Output` that carries its `end`, or silently by `abort`. Without `speculation`, no token
    is drafted. With several pipeline stages, steps in flight have no sequence in common, so that
    each stage can run another step."""

    # Seconds that a run may take. Longer steps gain nothing from runs, and drafts need the answers.
    max_run_s = 0.02

    def __init__(
        self,
        limits: Limits,
        blocks: BlockManager,
        speculation: Speculation | None = None,
        num_stages: int = 1,
    ) -> None:
        self.limits = limits
        self.num_stages = num_stages
        self.blocks = blocks
        self.speculation = speculation
        self.may_draft = True
        self.step_times = speculation.step_times if speculation else StepTimes()
        self._waiting = WaitingQueue(int(_SHORT_PART * limits.prefill_budget(num_decodes=1)))
        self._open = OpenSequences(blocks, self._waiting, limits.max_num_seqs)
        self._sequences = self._open.by_key
        self._running, self._forks = self._open.running, self._open.forks
        self.stats = self._open.stats
        self.swaps = Swaps(blocks, self._open, self.step_times)
        self._budgets = Budgets()
        self._prompt_budgets = PromptBudgets(self.step_times)
        self._now = 0.0  # when a step was last scheduled
        self._last_drafted = 0  # the last step with drafts

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
        """Prompt tokens of waiting and running sequences that are expected to be computed."""
        running = (seq.num_unscheduled_tokens for seq in self._running)
        return self._waiting.num_uncached_tokens + sum(count for count in running if count > 1)

    def open_sequences(self) -> list[SequenceKey]:
        """The keys of all sequences that have not ended."""
        return list(self._sequences)

    def add(self, seq: Sequence, n: int = 1) -> End | None:
        """Queues a sequence, or returns its end if it cannot be accepted. The other n - 1
        completions of its prompt are accepted or rejected with it. Their numbers and seeds follow
        its own."""
        if end := self.refusal(seq, n):
            return end
        if cause := seq.finish_cause():  # it was resubmitted with all its tokens
            return End(cause)
        request = seq.request
        if not request.resubmitted:
            self._budgets.charge(request.client, INPUT, seq.num_tokens, request.arrival)
        self._open.add(seq, n)
        return None

    def refusal(self, seq: Sequence, n: int = 1) -> End | None:
        """The end with which `add` would reject a sequence now, or None."""
        connection, number = seq.key
        if end := refusal(seq, n, self.limits, self._waiting, self._budgets):
            return end
        keys = [SequenceKey(connection, number + i) for i in range(max(n, seq.params.beam_width))]
        if any(key in self._sequences or key in self._forks.beam_keys for key in keys):
            return End(FinishCause.INVALID, "request: its number is in use")
        return None

    def followers(self, seq: Sequence) -> list[Sequence]:
        """The other completions of a sequence's prompt that still wait for it."""
        return self._forks.followers_of(seq)

    def abort(self, key: SequenceKey) -> None:
        """Ends a sequence, or all beams of its search, without an output. It may have ended
        already."""
        if seq := self._sequences.get(key):
            self._open.close_all_of(seq)

    def expire(self, now: float) -> list[Output]:
        """Ends the sequences whose deadline has passed at `now`."""
        outputs: list[Output] = []
        while seq := self._open.expired(now):
            outputs += self.end(seq, FinishCause.DEADLINE)
        return outputs

    def end(self, seq: Sequence, cause: FinishCause, message: str = "") -> list[Output]:
        """Ends a sequence, or all beams of its search, early."""
        outputs = self._forks.ends(seq, End(cause, message))
        self._open.close_all_of(seq)
        return outputs

    def schedule(self, now: float = 0.0) -> Step | None:
        """Plans the next step, or returns None if there is nothing to do until an answer arrives.

        Decodes come first, so that streams keep their pace. `_schedule_prompts` distributes the
        rest of the token budget. When decodes find too few blocks, running sequences are preempted
        and computed again later, those of the lowest priority and latest arrival first. Preemption
        waits until all steps in flight are answered, because they still write those blocks and may
        free others. Nothing is planned while drafts are in flight, or if it is better to wait for
        an answer and then draft.
        """
        self._now = now
        sequences = self._open
        in_flight = sequences.last_answered < sequences.last_step
        if self._last_drafted > sequences.last_answered:
            return None
        for beam in self._forks.beams_to_stop():
            sequences.preempt(beam)
        crowded = False
        while True:
            decodes, prompts = sequences.unscheduled(self.num_stages)
            # Need blocks for their next token. Prompts may only if layers have windows.
            full = [s for s in decodes + prompts if s.num_scheduled_tokens == s.blocks.capacity]
            if self.blocks.missing(full) <= self.blocks.num_free_blocks:
                break
            if in_flight:
                return None
            crowded = True
            sequences.preempt(max(self._running, key=_rank_of))
        room = self._draft_room()
        speculation = self.speculation if self.may_draft and room else None
        if in_flight and speculation and speculation.waits(decodes, room):
            return None
        for seq in full:
            self.blocks.reserve(seq, 1)

        number = sequences.last_step + 1
        if speculation and not (in_flight or crowded):
            rows = self._schedule_with_drafts(decodes, number, speculation.choose(decodes, room))
        else:
            rows = [seq.schedule(1, number, i) for i, seq in enumerate(decodes)]
        num_decodes, num_drafts = len(rows), len(rows) - len(decodes)
        max_tokens = self.limits.prefill_budget(num_decodes)
        is_shared = self._waiting.usages.several_are_open
        budget = self._prompt_budgets.budget(now, num_decodes, max_tokens, is_shared=is_shared)
        for seq, num_tokens in self._schedule_prompts(budget, prompts, now, may_admit=not crowded):
            if room := self.blocks.reserve(seq, num_tokens):
                rows.append(seq.schedule(room, number, len(rows)))
        return self._step(number, rows, num_decodes, num_drafts) if rows else None

    def schedule_run(self, now: float = 0.0, max_steps: int = 1) -> list[Step]:
        """Plans the next step, or up to `max_steps` decodes of the same sequences, if nothing else
        is to be planned before they are answered. Returns nothing if `schedule` returns None."""
        run: list[Step] = []
        while len(run) < max_steps and (step := self.schedule(now)):
            if not run:
                seconds = self.step_times.seconds(step.num_decodes)
                if self._waiting or len(step.rows) < self._open.num_admitted or not seconds:
                    return [step]
                max_steps = min(max_steps, step.max_run, int(self.max_run_s / seconds))
            run.append(step)
        return run

    @property
    def run_is_useless(self) -> bool:
        """Whether the steps in flight delay a sequence that waits, or all their sequences ended."""
        return bool(self._waiting) or not self._running

    def apply(self, step: Step, answer: Answer) -> list[Output]:
        """Applies the answer to the oldest step in flight, and returns its outputs."""
        sequences = self._open
        sequences.last_answered = step.number
        if step.copies:
            self.blocks.copied(step.copies)
        scored = [*take_prompt_logprobs(step, answer)] if answer.prompt_logprobs else []
        for row, child in self._forks.prompts_computed(step):
            row.seq.num_computed_tokens = row.start + row.num_tokens
            sequences.fork(row.seq, child)
        if answer.draft_ids and self.speculation:
            self.speculation.resolve(step, answer.draft_ids)
        outputs = self._apply_rows(step, answer)
        if answer.hidden_states:
            add_embeddings(step, answer, outputs)
        if len(self._waiting.usages) > 1 or self._budgets:
            self._charge(step, outputs)
        sequences.free_fenced(step.number)
        self.stats.sampled_tokens += len(outputs)
        if step.has_features:
            for output in outputs:
                if output.seq.params.stepwise:
                    output.seq.paused = True
                    if not output.seq.params.pauses:  # it only had to know this token
                        output.seq.unpause()
        if step.num_drafts:
            self._settle(step)
        if self._forks.beams and answer.logprobs:
            found = {step.rows[i].seq: logprobs for i, logprobs in answer.logprobs.items()}
            for advance in self._forks.advance_beams(found):
                sequences.advance_beams(advance)
                outputs += advance.outputs
        return scored + outputs if scored else outputs

    def fail(self, seq: Sequence, message: str) -> list[Output]:
        """Ends a sequence that no worker can run, and its followers, with an error. Call
        `requeue_all` next."""
        outputs: list[Output] = []
        for each in (*self.followers(seq), seq):
            outputs += self.end(each, FinishCause.INTERNAL, message)
        return outputs

    def restrict(self, only: Seq[Sequence] | None) -> None:
        """Schedules only the sequences in `only` from now on; None schedules all again. Preempts
        all others that run, so no step may be in flight."""
        self._open.restrict(only)

    def rewind_all(self) -> None:
        """Recovers from the loss of the steps in flight, if what answered steps wrote to the cache
        is kept. Every running sequence continues after its last answered step."""
        self._open.rewind_all()

    def requeue_all(self) -> None:
        """Recovers from the loss of the cache and of the steps in flight. Every running sequence is
        computed again, ahead of waiting sequences of the same priority."""
        self._open.requeue_all()

    def check_integrity(self) -> None:
        """Raises AssertionError if blocks or queues contradict each other. For tests."""
        self._open.check_integrity()

    def _draft_room(self) -> int:
        """How many tokens may be drafted: in rows that no sequence may need, and in blocks that no
        decode may need."""
        rows = self.limits.max_num_seqs - self._open.num_admitted - len(self._waiting)
        num_blocks = self.blocks.num_free_blocks - self._needed_by_decodes
        return max(0, min(rows, num_blocks * self.blocks.paging.part_size))

    @property
    def _needed_by_decodes(self) -> int:
        """The maximum of blocks that running sequences need for a token each."""
        return len(self._running) * len(self.blocks.paging.tables)

    def _schedule_with_drafts(
        self, decodes: list[Sequence], number: int, drafts: dict[Sequence, Seq[int]]
    ) -> list[Row]:
        """Schedules decodes, and after each of them the tokens drafted for it."""
        rows: list[Row] = []
        for seq in decodes:
            rows.append(seq.schedule(1, number, len(rows)))
            if tokens := drafts.get(seq):
                room = self.blocks.reserve(seq, len(tokens), keep_free=self._needed_by_decodes)
                rows += seq.schedule_drafts(tokens[:room]) if room else ()
        return rows

    def _step(self, number: int, rows: list[Row], num_decodes: int, num_drafts: int) -> Step:
        """Makes the step of these rows, and counts it."""
        self._open.last_step = number
        if num_drafts:
            self._last_drafted = number
        num_tokens = sum(row.num_tokens for row in rows)
        stats = self.stats
        stats.steps += 1
        stats.step_sequences += len(rows) - num_drafts
        stats.step_tokens += num_tokens
        stats.draft_tokens += num_drafts
        copies, has_features = self.blocks.take_copies(), any(row.seq.features for row in rows)
        return Step(number, rows, copies, has_features, num_decodes, num_drafts, num_tokens)

    def _apply_rows(self, step: Step, answer: Answer) -> list[Output]:
        """Notes what an answered step has computed, and appends the tokens that hold."""
        part_size, finished = self.blocks.paging.part_size, Status.FINISHED
        beams = self._forks.beams or ()  # usually an empty tuple, which hashes no sequence
        logprobs = answer.logprobs
        outputs: list[Output] = []
        for i, (row, token) in enumerate(zip(step.rows, answer.token_ids, strict=True)):
            seq = row.seq
            if seq.status is finished:  # meanwhile; its token is dropped
                continue
            if row.draft is not None and not self._accepts(row):
                continue
            computed = seq.num_computed_tokens = row.start + row.num_tokens
            if row.num_tokens > 1 or computed % part_size == 0:  # else it fills no block
                self.blocks.advance(seq)
            if row.samples and seq not in beams:
                seq.tokens.append(token)
                end = None
                params = seq.params
                if (
                    computed == seq.num_prompt_tokens + params.max_tokens - 1
                    or token in params.eos_token_ids
                    or token in params.stop_token_ids
                ):
                    cause = seq.finish_cause()
                    assert cause is not None
                    end = End(cause)
                    self._open.close(seq)
                found = logprobs.get(i) if logprobs else None
                outputs.append(Output(seq, token, computed - seq.num_prompt_tokens, end, found))
        return outputs

    def _accepts(self, row: Row) -> bool:
        """Whether a row's drafted token holds, and counts it."""
        tokens, start = row.seq.tokens, row.start  # those of the rows before are appended
        accepted = len(tokens) > start and tokens[start] == row.draft
        self.stats.accepted_tokens += accepted
        return accepted

    def _settle(self, step: Step) -> None:
        """Lets the sequences with drafts in an answered step continue after what was accepted."""
        for seq in {row.seq: None for row in step.rows if row.draft is not None}:
            if seq.status is Status.RUNNING:
                seq.begin_at(seq.num_computed_tokens)

    def _charge(self, step: Step, outputs: list[Output]) -> None:
        """Charges clients for a step's sampled tokens, including those of beams. The tokens of a
        client that is alone need not be counted unless it has a budget."""
        sampled = Counter(map(_usage_of, outputs))
        if beams := self._forks.beams:
            sampled.update(row.seq.usage for row in step.rows if row.samples and row.seq in beams)
        for usage, num_tokens in sampled.items():
            usage.add_output(num_tokens)
            self._budgets.charge(usage.client, OUTPUT, num_tokens, self._now)

    def _schedule_prompts(
        self, budget: PromptBudget, prompts: list[Sequence], now: float, *, may_admit: bool
    ) -> Iterator[tuple[Sequence, int]]:
        """Admits waiting sequences, and divides `budget` among them and `prompts`.

        Short prompts come first, in half of the budget, so that they do not wait behind a long
        prompt's chunks. Then all prompts follow in order, one long prompt after another.
        """
        rest = []
        for seq in prompts:
            if budget.fits(seq, _SHORT_PART):
                yield seq, budget.take(seq)
            else:
                rest.append(seq)
        while (
            may_admit and (waiting := self._next_short(budget)) and self._open.admit(waiting, now)
        ):
            if waiting.status is Status.RUNNING:
                yield waiting, budget.take(waiting)
        for seq in rest:
            yield seq, budget.take(seq)
        while may_admit and (waiting := self._waiting.peek()) and budget.fits_partly(waiting):
            if not self._open.admit(waiting, now):
                break
            if waiting.status is Status.RUNNING:
                yield waiting, budget.take(waiting)

    def _next_short(self, budget: PromptBudget) -> Sequence | None:
        """A waiting sequence that fits into the part of `budget` for short prompts and may run now,
        or None. It is the next in line, or takes nothing that the next in line needs."""
        seq, first = self._waiting.peek_short(), self._waiting.peek()
        if seq is None or first is None or not budget.fits(seq, _SHORT_PART):
            return None
        num_blocks = self.blocks.blocks_for(seq) + self.blocks.blocks_for(first)
        fits_beside = (
            num_blocks <= self.blocks.num_free_blocks
            and self._open.num_admitted + 2 <= self.limits.max_num_seqs
            and self._waiting.may_overtake(seq, first)
        )
        return seq if seq is first or fits_beside else None
