"""Finds the requests that kill schedulers, by counting the deaths that each one was part of.

A scheduler is lost for many reasons, and what it knew is lost with it. So its successor is given
everything again, and what gets a few tokens is no suspect any more. What was with two that died, in
a row, is only named to the next one, which has it submitted on trial, in groups that are halved at
each death (`scheduler_svc/trials.py`), down to the one that kills it alone.

With n suspects one culprit costs at most 3 + ceil(log2 n) schedulers, or 4 if it is the only one,
and k culprits at most k times that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from frontend.engines.token_stream import TokenStream

# What gets that many tokens from one scheduler is not what kills it: fewer may be on their way to
# the frontend when it dies, and be sent by the next.
_MIN_PROGRESS = 4
# A suspect was with that many schedulers that died, without getting any further, ...
_MIN_LOSSES_OF_SUSPECTS = 2
# ... a culprit with that many, ...
MIN_LOSSES = 3
# ... that many of them with nothing else there, and without getting any token: processes are killed
# for other reasons, too.
MIN_LOSSES_ALONE = 2


@dataclass(slots=True)
class Record:
    """What is known of a completion: its losses since it last made progress."""

    num_tokens: int = 0  # that it had at the last loss
    losses: int = 0
    losses_alone: int = 0


class Suspects:
    """Completions of one frontend that schedulers died with, by their numbers."""

    def __init__(self) -> None:
        self._records: dict[int, Record] = {}
        self._untried: set[int] = set()
        self._on_trial: set[int] = set()
        self._alone = False  # whether those on trial are one, with nothing else in the scheduler

    def __contains__(self, number: int) -> bool:
        return number in self._untried or number in self._on_trial

    @property
    def on_trial(self) -> bool:
        return bool(self._on_trial)

    def losses(self, open_: Mapping[int, TokenStream]) -> dict[int, int]:
        """The losses of each suspect that is still open."""
        self._untried &= open_.keys()
        return {number: self._records[number].losses for number in sorted(self._untried)}

    def hand_over(self, number: int) -> Record | None:
        """Forgets a completion, which another engine goes on with; returns what is known of it."""
        self._untried.discard(number)
        self._on_trial.discard(number)
        return self._records.pop(number, None)

    def take_over(self, number: int, record: Record) -> bool:
        """Takes in what another engine's `hand_over` returned; whether that makes a suspect."""
        self._records[number] = record
        is_suspect = record.losses >= _MIN_LOSSES_OF_SUSPECTS
        if is_suspect:
            self._untried.add(number)
        return is_suspect

    def lost(
        self, open_: Mapping[int, TokenStream], streams: Iterable[TokenStream]
    ) -> TokenStream | None:
        """Takes note that the scheduler died with `streams`, which are among those still open.

        Returns:
            The culprit, if it is now known, which is then forgotten.
        """
        self._records = {n: record for n, record in self._records.items() if n in open_}
        for stream in streams:
            number, num_tokens = stream.number, len(stream.tokens)
            record = self._records.get(number)
            if record is None or num_tokens >= record.num_tokens + _MIN_PROGRESS:
                record = self._records[number] = Record()
            alone = self._alone and number in self._on_trial
            record.losses += 1
            record.losses_alone += alone and num_tokens == record.num_tokens
            record.num_tokens = num_tokens
            if record.losses >= _MIN_LOSSES_OF_SUSPECTS:
                self._untried.add(number)
        self._on_trial.clear()
        for number in self._untried & open_.keys():
            record = self._records[number]
            if record.losses >= MIN_LOSSES and record.losses_alone >= MIN_LOSSES_ALONE:
                self._untried.remove(number)
                return open_[number]
        return None

    def end_trial(self) -> None:
        """Takes note that the scheduler is gone. Unless it died, the trial does not count."""
        self._untried |= self._on_trial
        self._on_trial.clear()

    def begin_trial(self, numbers: Iterable[int], *, alone: bool) -> tuple[list[int], list[int]]:
        """Puts other suspects on trial than before; those that were are none for now.

        Returns:
            The numbers on trial now, and those that were.
        """
        cleared = sorted(self._on_trial)
        self._on_trial = self._untried.intersection(numbers)
        self._untried -= self._on_trial
        self._alone = alone
        return sorted(self._on_trial), cleared

    def clear(self, open_: Mapping[int, TokenStream]) -> list[int]:
        """Takes off trial those that have made progress or ended, and returns them."""
        cleared = [
            number
            for number in sorted(self._on_trial)
            if number not in open_
            or len(open_[number].tokens) >= self._records[number].num_tokens + _MIN_PROGRESS
        ]
        self._on_trial.difference_update(cleared)
        return cleared
