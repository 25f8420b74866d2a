"""The completions at one engine, and which of them its scheduler has.

A scheduler that dies loses its state, so the frontends count the schedulers that died with each
completion (`engines.deaths`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from frontend.engines.connection import RETRY_AFTER_S
from frontend.engines.placement import EngineLoad, Fit
from frontend.engines.token_stream import TokenStream
from shared.errors import QueueFullError


@dataclass(slots=True, eq=False)
class Entry:
    """A completion at this engine."""

    stream: TokenStream
    submitted: bool = False  # to the connected scheduler
    fit: Fit | None = None  # of a request's first completion, until it has begun


class Ledger:
    """Open completions by number, in the order in which they arrived."""

    def __init__(self, engine: int, load: EngineLoad) -> None:
        """`engine`: its number in the prefix index; `load`: counts its completions and tokens."""
        self.entries: dict[int, Entry] = {}
        self._engine = engine
        self._load = load
        self._num_unstarted = 0  # requests

    def check_room(self, max_waiting: int) -> None:
        """Raises QueueFullError if `max_waiting` requests or more are without a first token."""
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
            fit.index.add_pending(self._engine, fit.missing)
        entries = []
        for stream in streams:
            entries.append(Entry(stream))
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
                fit.index.remove_pending(self._engine, fit.missing)

    def disconnect(self, *, died: bool, alone: bool) -> TokenStream | None:
        """Handles the loss of the scheduler. `alone`: it had no completion but the one on trial.

        Returns:
            The completion that is to blame for the scheduler's death, if that is now known.
        """
        culprit = None
        for entry in self.entries.values():
            stream = entry.stream
            counts = died and entry.submitted and stream.stands_for_itself
            if counts and stream.record.add(len(stream.tokens), alone=alone):
                culprit = stream
            entry.submitted = False
        return culprit
