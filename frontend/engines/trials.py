"""Submits the suspects at an engine one at a time (`engines.deaths`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from frontend.engines.ledger import Entry, Ledger
from frontend.engines.token_stream import TokenStream

log = structlog.get_logger(__name__)


class Trials:
    """The trials of suspects at one engine."""

    def __init__(
        self,
        ledger: Ledger,
        submit: Callable[[TokenStream], None],
        reconnect: Callable[[], None],
        has_other_model: Callable[[TokenStream], bool],
    ) -> None:
        self._ledger = ledger
        self._submit = submit
        self._reconnect = reconnect
        self._has_other_model = has_other_model
        self._alone = False  # whether the scheduler has no other connection
        self._current: Entry | None = None
        self._timer: asyncio.TimerHandle | None = None

    def need_to_be_alone(self) -> bool:
        """Whether the next suspect calls for a connection that is the scheduler's only one."""
        suspect = self._next()
        return suspect is not None and suspect.stream.record.must_be_alone

    def connected(self, *, alone: bool) -> None:
        """Begins the first trial on a new connection."""
        self._alone = alone
        self.begin()

    def begin(self) -> None:
        """Submits the next suspect unless one is on trial. Reconnects if that suspect, or the lack
        of one, calls for a connection of the other kind."""
        if self._current:
            return
        if self._alone is not self.need_to_be_alone():
            self._reconnect()
        elif suspect := self._next():
            stream, self._current = suspect.stream, suspect
            log.warning(
                "request may kill schedulers; trying it",
                request_id=stream.request.request_id,
                deaths=stream.record.count,
                alone=self._alone,
            )
            suspect.submitted = True
            self._submit(stream)
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(stream.record.trial_s, self._end)

    def check(self) -> None:
        """Ends the trial of a completion that has made progress, has ended or has left."""
        if trial := self._current:
            stream = trial.stream
            if not self._is_open(trial) or len(stream.tokens) >= stream.record.goal:
                self._end()

    def disconnected(self) -> None:
        """Drops the trial on a connection that is lost."""
        self._current = None
        if self._timer:
            self._timer.cancel()

    def _end(self) -> None:
        trial = self._current
        self.disconnected()
        assert trial
        trial.stream.record.survived = self._is_open(trial)
        if self._alone:
            self._reconnect()
        else:
            self.begin()

    def _is_open(self, entry: Entry) -> bool:
        return self._ledger.entries.get(entry.stream.number) is entry

    def _next(self) -> Entry | None:
        """The suspect that was in the most deaths, of those that are not submitted yet."""
        suspects = [
            entry
            for entry in self._ledger.entries.values()
            if entry.stream.record.is_suspect and not entry.submitted
            if not self._has_other_model(entry.stream)
        ]
        return max(suspects, key=lambda each: each.stream.record.count, default=None)
