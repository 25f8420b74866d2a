"""A worker without a model that trusts nothing: it runs steps of `worker.proto` on a cache of token
ids and raises if a step would corrupt a real cache or read a corrupt one.

Like a key and a value, the content of a slot depends on all tokens up to its position: it is the
state of `tests.oracle` there. A wrong slot, position, table or prefix is caught when attended to.
Columns that contradict each other or a limit are those that a worker rejects.

Pure: no asyncio, no gRPC.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from random import Random

import numpy as np

from shared.errors import FailedPreconditionError, InvalidArgumentError
from shared.paging import Paging
from shared.pb import worker_pb2
from tests.oracle import EMPTY, VOCAB_SIZE, draft, extend
from tests.sanitizer_features import Features, Owner, SanitizerError, fail, hidden_states
from tests.sanitizer_transfers import SanitizedTransfers
from tests.step_columns import Ints, StepColumns, describe, ints, steps_of, tables_of
from worker_svc.step.arrays import DRAFTED, StepArrays
from worker_svc.step.decode import StepLimits, decode_step

__all__ = ["Beside", "Limits", "Owner", "Sanitizer", "SanitizerError"]

MAX_RUN = 4  # steps
_MAX_IN_FLIGHT = 1 + MAX_RUN  # steps that an engine sends before it has an answer


@dataclass(frozen=True)
class Beside:
    """The scheduler's knowledge when it sent a step. A row of the owner of the row before it has a
    drafted token, which may not be the owner's."""

    owners: Seq[Owner]  # of the rows
    answered: int  # the last step whose answer had arrived
    references: Ints  # per block, how many live sequences hold it


@dataclass(frozen=True)
class Limits:
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    graph_tokens: int = 0


@dataclass(frozen=True)
class _Change:
    """The slots that a step overwrote, with their contents before it."""

    step_id: int
    slots: Ints
    content: list[Ints]  # before the step, by column


class Sanitizer:
    """Checks and runs the steps of an epoch, and of those after it that keep its cache.

    Args:
        by_batch: see `Features.answer`.
    """

    def __init__(
        self,
        limits: Limits,
        num_blocks: int,
        paging: Paging,
        epoch: int,
        *,
        by_batch: bool = False,
    ) -> None:
        self._by_batch = by_batch
        self.num_changed = 0  # tokens of the last step that the batch has changed
        slots = num_blocks * paging.slots_per_block
        self._limits = StepLimits(
            VOCAB_SIZE,
            num_blocks,
            paging,
            limits.max_num_seqs,
            limits.max_num_batched_tokens,
            limits.max_model_len,
            drafts=True,
            graph_tokens=limits.graph_tokens,
        )
        self._paging = paging
        self._epoch = epoch
        self._last: StepArrays | None = None  # of this epoch
        self._last_tokens: list[int] = []
        # Per slot: its content, -1 until written, ...
        self._tokens = np.full(slots, -1, np.int64)
        self._positions = np.full(slots, -1, np.int64)
        self._states = np.full(slots, -1, np.int64)
        self._salts = np.zeros(slots, np.int64)
        self._tables = np.zeros(slots, np.int64)  # the number of the table that led to it
        # ... and who computed it, in which step, and whether that step was lost. A copy takes all
        # of this along.
        self._writers = np.zeros(slots, np.int64)
        self._computed = np.zeros(slots, np.int64)
        self._unanswered = np.zeros(slots, np.int64)
        self._columns = [
            self._tokens,
            self._positions,
            self._states,
            self._salts,
            self._tables,
            self._writers,
            self._computed,
            self._unanswered,
        ]
        self._changes: deque[_Change] = deque(maxlen=2 * _MAX_IN_FLIGHT)  # copies, and writes
        # Per slot: the last steps that wrote it and that attended to it.
        self._written = np.zeros(slots, np.int64)
        self._attended = np.zeros(slots, np.int64)
        self.transfers = SanitizedTransfers(
            paging,
            self._columns,
            self._unanswered,
            self._computed,
            self._salts,
            self._written,
            self._attended,
        )

    @property
    def step_id(self) -> int:
        """The last step of this epoch, 0 before the first."""
        return self._last.step_id if self._last else 0

    def keep(self, epoch: int, answered: int, rng: Random) -> None:
        """Begins a new epoch after the workers were lost, with the cache that they leave.

        Args:
            answered: the last step that all ranks have answered. Later steps have made a random
                part of their writes and copies. No step may rely on any of these.
        """
        assert self.step_id - answered <= _MAX_IN_FLIGHT, "steps are not known any more"
        lost = [change for change in self._changes if change.step_id > answered]
        for change in reversed(lost):
            undone = np.array([rng.random() < 0.5 for _ in change.slots], bool)
            for column, before in zip(self._columns, change.content, strict=True):
                column[change.slots[undone]] = before[undone]
        for change in lost:
            self._unanswered[change.slots] = 1
        self._changes.clear()
        self._epoch, self._last = epoch, None
        for column in (self._computed, self._written, self._attended, self.transfers.in_flight):
            column[:] = 0

    def drop(self, begun: int) -> None:
        """Forgets the steps after step `begun`, whose ids are used up."""
        dropped = [change for change in self._changes if change.step_id > begun]
        for change in reversed(dropped):
            for column, before in zip(self._columns, change.content, strict=True):
                column[change.slots] = before
            self._changes.remove(change)
        if self._last:
            self._last = replace(self._last, samples=np.zeros_like(self._last.samples))

    def run_all(
        self, request: worker_pb2.StepRequest, beside: Beside | None = None
    ) -> list[worker_pb2.StepResponse]:
        """Answers the steps of a message."""
        return [self.run(step, beside) for step in steps_of(request, self._paging)]

    def run(
        self, request: worker_pb2.StepRequest, beside: Beside | None = None
    ) -> worker_pb2.StepResponse:
        """Answers a step with the oracle's tokens and log-probabilities.

        Raises:
            SanitizerError: the step is wrong; the message shows it.
        """
        try:
            return self._run(request, beside)
        except (SanitizerError, InvalidArgumentError, FailedPreconditionError) as error:
            shown = describe(request, [o.name for o in beside.owners] if beside else None)
            raise SanitizerError(f"{error}\n{shown}") from None

    def _run(
        self, request: worker_pb2.StepRequest, beside: Beside | None
    ) -> worker_pb2.StepResponse:
        if request.epoch != self._epoch:
            fail(f"epoch: {request.epoch}, expected {self._epoch}")
        decoded = self._last = decode_step(request, self._limits, self._last)
        tables = tables_of(request, self._paging)
        step, features = tables[0], Features(tables[0], decoded)
        for number, each in enumerate(tables):
            each.find_slots([] if number else features.rows_that_read_tokens)
        written = np.concatenate([each.slots for each in tables])
        if len(np.unique(written)) != len(written):
            fail("a slot is written twice")
        self._copy(step, beside)
        if beside is not None:
            self._check_writes(step, written, beside)
        self._note_change(step, written)
        self._write(tables, beside)
        for number, each in enumerate(tables):
            self._check_attended(each, number)
            if beside is not None:
                self._check_owners(each, beside)
            self._attended[each.attended_slots] = request.step_id
        if beside is not None:
            features.check_owners(beside.owners)
        answer = features.answer(self._states[step.attended_slots], by_batch=self._by_batch)
        self.num_changed = features.num_changed
        if self._by_batch and beside is not None:
            self._continue(step, beside.owners, ints(answer.token_ids).tolist())
        answer.draft_ids = np.array(self._draft_ids, "<i4").tobytes()
        answer.hidden_states = hidden_states(decoded).tobytes()
        self._last_tokens = ints(answer.token_ids).tolist()
        return answer

    def _continue(self, step: StepColumns, owners: Seq[Owner], tokens: list[int]) -> None:
        """Notes the tokens that rows have sampled, except those after a wrong draft."""
        first, right = 0, True
        for row, (owner, token) in enumerate(zip(owners, tokens, strict=True)):
            is_drafted = row > 0 and owners[row - 1] is owner
            right = not is_drafted or (right and self._ids[first] == tokens[row - 1])
            if right and step.samples[row]:
                owner.continue_with(token, int(step.context_lens[row]))
            first += int(step.query_lens[row])

    def _copy(self, step: StepColumns, beside: Beside | None) -> None:
        """Makes all copies at once, before anything is written."""
        if not len(step.copies):
            return
        blocks = step.copies
        sources, slots = (
            (blocks[:, i, None] * step.slots_per_block + np.arange(step.slots_per_block)).ravel()
            for i in range(2)
        )
        if beside is not None:
            if (beside.references[blocks[:, 1]] != 1).any():
                fail("copies to a block that is held by not exactly one sequence")
            self._check_not_in_flight(slots, beside)
        self._note_change(step, slots)
        for column in self._columns:
            column[slots] = column[sources]
        self._written[slots] = self._attended[slots] = 0

    def _note_change(self, step: StepColumns, slots: Ints) -> None:
        before = [column[slots] for column in self._columns]
        self._changes.append(_Change(step.request.step_id, slots, before))

    def _check_not_in_flight(self, slots: Ints, beside: Beside) -> None:
        self.transfers.check_no_use_of(slots)
        in_flight = np.maximum(self._attended[slots], self._written[slots])
        if (in_flight > beside.answered).any():
            fail(
                f"writes to a slot of step {in_flight.max()}, which is in flight: only steps up "
                f"to {beside.answered} are answered"
            )

    def _check_writes(self, step: StepColumns, slots: Ints, beside: Beside) -> None:
        """A step must not write to a slot that somebody else reads."""
        references = beside.references[slots // step.slots_per_block]
        if (references != 1).any():
            fail(f"writes to a block that {references[references != 1][0]} sequences hold")
        self._check_not_in_flight(slots, beside)

    def _write(self, tables: Seq[StepColumns], beside: Beside | None) -> None:
        step = tables[0]
        ids, first = self._resolve(step.input_ids), 0
        self._ids = ids
        self._draft_ids: list[int] = []
        # The slots of the tokens before the rows'.
        starts = step.context_lens - step.query_lens
        before = step.slots_at(np.maximum(starts - 1, 0), np.ones_like(starts)).tolist()
        lens = zip(step.query_lens.tolist(), step.context_lens.tolist(), strict=True)
        for row, (query_len, context_len) in enumerate(lens):
            start, end = context_len - query_len, first + query_len
            state = int(self._states[before[row]]) if start else EMPTY  # may be of the row before
            for i, slot in enumerate(step.slots[first:end].tolist(), first):
                if ids[i] == DRAFTED:
                    ids[i] = draft(state, int(step.seeds[row]))
                    self._draft_ids.append(ids[i])
                self._states[slot] = state = extend(state, ids[i])
            first = end
        states = self._states[step.slots]
        for number, each in enumerate(tables):
            slots = each.slots
            self._unanswered[slots], self._tables[slots] = 0, number
            self._tokens[slots], self._states[slots] = ids, states
            self._positions[slots] = step.positions
            self._written[slots] = self._computed[slots] = step.request.step_id
            if beside is not None:
                owners = beside.owners
                self._writers[slots] = np.repeat([o.number for o in owners], step.query_lens)
                self._salts[slots] = np.repeat([o.salt for o in owners], step.query_lens)

    def _resolve(self, input_ids: Ints) -> list[int]:
        """Replaces references to the previous step's rows with the tokens sampled there."""
        ids: list[int] = input_ids.tolist()
        for place in np.flatnonzero((input_ids < 0) & (input_ids != DRAFTED)).tolist():
            ids[place] = self._last_tokens[-1 - ids[place]]
        return ids

    def _check_attended(self, step: StepColumns, number: int) -> None:
        """Each slot of a context must hold a token computed after exactly those before it, for the
        layers of the table."""
        slots = step.attended_slots
        if (self._tables[slots] != number).any():
            fail(f"table {number} leads to a slot of the other table")
        if self._unanswered[slots].any():
            place = np.flatnonzero(self._unanswered[slots])[0]
            fail(
                f"a slot of an unanswered step is trusted: position "
                f"{step.attended_positions[place]} of {step.row_name(place)}"
            )
        if (self._positions[slots] != step.attended_positions).any():
            place = np.flatnonzero(self._positions[slots] != step.attended_positions)[0]
            fail(
                f"position {step.attended_positions[place]} of {step.row_name(place)} attends to a "
                f"slot that holds position {self._positions[slots[place]]}"
            )
        found = self._states[slots]
        before = np.concatenate(([EMPTY], found[:-1]))
        before[step.first_attended] = EMPTY
        differs = extend(before, self._tokens[slots]) != found
        differs[step.first_attended[step.first_seen > 0]] = False  # after tokens that it cannot see
        wrong = np.flatnonzero(differs)
        if len(wrong):
            fail(
                f"position {step.attended_positions[wrong[0]]} of {step.row_name(wrong[0])} was "
                "computed after other tokens"
            )

    def _check_owners(self, step: StepColumns, beside: Beside) -> None:
        """Tokens must be the sequence's own; those that others computed must have been answered."""
        slots, lens = step.attended_slots, step.attended_lens
        known = self._known_lens(step, beside.owners)
        expected = []
        for row, owner in enumerate(beside.owners):
            if step.context_lens[row] > len(owner.states):
                fail(f"{owner.name} needs no token at position {step.context_lens[row] - 1}")
            first_seen, end = step.first_seen[row], step.first_attended[row] + lens[row]
            num_drafted = min(step.context_lens[row] - known[row], lens[row])
            expected += [owner.states[first_seen : known[row]]]
            expected += [self._states[slots[end - num_drafted : end]]]
        foreign = self._writers[slots] != np.repeat([o.number for o in beside.owners], lens)
        salts = np.repeat([owner.salt for owner in beside.owners], lens)
        for wrong, what in (
            (self._states[slots] != np.concatenate(expected), "holds another sequence's tokens"),
            (foreign & (self._computed[slots] > beside.answered), "comes from a step in flight"),
            (self._salts[slots] != salts, "was computed for another cache salt"),
        ):
            if wrong.any():
                place = np.flatnonzero(wrong)[0]
                fail(f"position {step.attended_positions[place]} of {step.row_name(place)} {what}")
        if step.seeds.tolist() != [owner.params.seed for owner in beside.owners]:
            fail("seeds are those of other rows")

    @staticmethod
    def _known_lens(step: StepColumns, owners: Seq[Owner]) -> list[int]:
        """The number of leading tokens of each row's context that are not drafted."""
        known: list[int] = step.context_lens.tolist()
        for row in range(1, len(owners)):
            if owners[row] is owners[row - 1]:
                if (
                    step.query_lens[row] != 1
                    or step.context_lens[row] != 1 + step.context_lens[row - 1]
                ):
                    fail(f"row {row} has no draft of the token after row {row - 1}")
                if not step.samples[row - 1]:
                    fail(f"row {row} has a draft of a token that row {row - 1} does not sample")
                known[row] = known[row - 1]
        return known
