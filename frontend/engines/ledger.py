"""The completions at one engine, and the state of each at its scheduler.

A scheduler that dies loses its state, so the frontends count the schedulers that died with each
completion. If two schedulers died with a completion, without progress in between, the completion is
a suspect (`shared/suspects.py`). The frontend names its suspects to the next scheduler, which has
them submitted on trial (`scheduler_svc/rpc/trials.py`).
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from frontend.engines.connection import RETRY_AFTER_S
from frontend.engines.placement import EngineLoad, Fit
from frontend.engines.token_stream import TokenStream
from shared.errors import QueueFullError
from shared.suspects import Record

# A completion makes progress with this many tokens from one scheduler. Fewer tokens may have been
# in flight to the frontend when a scheduler died, and then come from the next scheduler.
MIN_PROGRESS = 4


class State(enum.Enum):
    """The state of a completion at the scheduler. A withheld completion becomes SENT when it is
    submitted. A suspect becomes SENT once it has passed its trial."""

    WITHHELD = enum.auto()  # not sent; it is submitted as soon as that is allowed
    SENT = enum.auto()
    WITHDRAWN = enum.auto()  # it must drop the completion, but may still have it
    SUSPECT = enum.auto()  # only its number is sent, until a Trial asks for it
    ON_TRIAL = enum.auto()  # sent on trial, together with others
    ALONE = enum.auto()  # sent on trial, while no frontend has another completion there


_Transitions = Mapping[State, State]
# States that are not keys of a table stay as they are.
_WITHDRAW: _Transitions = {
    State.SENT: State.WITHDRAWN,
    State.ON_TRIAL: State.WITHDRAWN,
    State.ALONE: State.WITHDRAWN,
}
_NEXT_TRIAL: _Transitions = {
    State.WITHDRAWN: State.WITHHELD,
    State.ON_TRIAL: State.SENT,
    State.ALONE: State.SENT,
}
_DISCONNECT: _Transitions = {
    State.SENT: State.WITHHELD,
    State.WITHDRAWN: State.WITHHELD,
    State.ON_TRIAL: State.SUSPECT,
    State.ALONE: State.SUSPECT,
}
_TRIED = State.ON_TRIAL, State.ALONE
_AT_SCHEDULER = State.SENT, State.WITHDRAWN, *_TRIED


@dataclass(slots=True, eq=False)
class Entry:
    """A completion at this engine."""

    stream: TokenStream
    state: State
    fit: Fit | None = None  # of a request's first completion, until it has begun

    @property
    def is_suspect(self) -> bool:
        return self.state is State.SUSPECT or self.state in _TRIED


class Ledger:
    """Open completions by number, in the order in which they arrived."""

    def __init__(self, engine: int, load: EngineLoad) -> None:
        """`engine`: its number in the prefix index; `load`: counts its completions and tokens."""
        self.entries: dict[int, Entry] = {}
        self.holding = False  # nothing is submitted while a suspect is tried alone
        self._engine = engine
        self._load = load
        self._num_unstarted = 0  # requests
        self._trial: list[int] = []  # the numbers on trial; some may have ended

    def check_room(self, max_waiting: int) -> None:
        """
        Raises:
            QueueFullError: `max_waiting` requests or more are without a first token.
        """
        if self._num_unstarted >= max_waiting:
            raise QueueFullError(
                f"{self._num_unstarted} requests are waiting; the limit is {max_waiting}",
                RETRY_AFTER_S,
            )

    def add(self, streams: Sequence[TokenStream], fit: Fit) -> list[Entry]:
        """Adds the completions of a request, which are yet to be sent."""
        self._load.num_open += len(streams)
        self._num_unstarted += 1
        self._load.unstarted_tokens += fit.uncached_tokens
        if fit.index:
            fit.index.promise(self._engine, fit.missing)
        entries = []
        for stream in streams:
            state = State.SUSPECT if stream.record.is_suspect else State.WITHHELD
            entries.append(Entry(stream, state))
            self.entries[stream.number] = entries[-1]
        entries[0].fit = fit
        return entries

    def remove(self, number: int) -> TokenStream | None:
        """Removes a completion that has ended or continues elsewhere. None if it is not here."""
        entry = self.entries.pop(number, None)
        if entry is None:
            return None
        self._load.num_open -= 1
        self.settle(entry)
        return entry.stream

    def settle(self, entry: Entry) -> None:
        """Stops counting a completion's expected work, because it has begun or has left."""
        fit, entry.fit = entry.fit, None
        if fit:
            self._num_unstarted -= 1
            self._load.unstarted_tokens -= fit.uncached_tokens
            if fit.index:
                fit.index.withdraw(self._engine, fit.missing)

    def begin_trial(
        self, numbers: Iterable[int], *, withdraw: bool, alone: bool
    ) -> tuple[list[Entry], list[int]]:
        """Applies a Trial.

        Returns:
            The suspects to submit, and the numbers of those that were on trial until now.
        """
        before, self._trial = self._trial, []
        self._move(_WITHDRAW if withdraw else _NEXT_TRIAL)
        self.holding = withdraw or alone
        for number in numbers:
            entry = self.entries.get(number)
            if entry and entry.state is State.SUSPECT:
                entry.state = State.ALONE if alone else State.ON_TRIAL
                self._trial.append(number)
        return [self.entries[number] for number in self._trial], before

    def clear(self) -> list[int]:
        """Ends the trial of completions that have made progress. Returns the numbers of these and
        of completions on trial that have ended."""
        cleared = []
        for number in self._trial:
            entry = self.entries.get(number)
            if entry is None:
                cleared.append(number)
            elif len(entry.stream.tokens) >= entry.stream.record.goal:
                entry.state = State.SENT
                cleared.append(number)
        self._trial = [number for number in self._trial if number not in cleared]
        return cleared

    def disconnect(self, *, died: bool) -> TokenStream | None:
        """Handles the loss of the scheduler. A trial counts only if the scheduler died.

        Returns:
            The completion that is to blame, if that is now known.
        """
        lost = [
            entry
            for entry in self.entries.values()
            if died and entry.state in _AT_SCHEDULER and entry.stream.stands_for_itself
        ]
        for entry in lost:
            _count_loss(entry)
        self._move(_DISCONNECT)
        for entry in lost:
            entry.state = State.SUSPECT if entry.stream.record.is_suspect else State.WITHHELD
        self.holding, self._trial = False, []
        return next((entry.stream for entry in lost if entry.stream.record.is_guilty), None)

    def _move(self, transitions: _Transitions) -> None:
        for entry in self.entries.values():
            entry.state = transitions.get(entry.state, entry.state)


def _count_loss(entry: Entry) -> None:
    """Counts a scheduler's death against a completion. A completion that got a token while it was
    alone is not to blame for the death."""
    stream, goal = entry.stream, len(entry.stream.tokens) + MIN_PROGRESS
    if len(stream.tokens) >= stream.record.goal:
        stream.record = Record()
    stream.record.lost(goal, alone=entry.state is State.ALONE and goal == stream.record.goal)
