"""Finds the sequence that makes the workers fail by group testing: suspects are computed again in
groups that are halved (Dorfman 1943; Hwang, "A method for detecting all defective members").

A worker is lost for many reasons, and mostly not for what it was computing. So after the first loss
everything is computed again as if nothing had happened, and whatever gets past the place where it
was lost is no suspect any more. What is in flight in a second loss, before it got past, is put on
trial: one half, then the other, with nothing else in the engine. A group that gets past is
innocent, one that is lost again is halved in turn, down to the one that fails alone.

With n suspects one culprit costs at most 3 + ceil(log2 n) losses, k culprits at most k times that,
and innocents are computed again as often. The engine makes sure before each attempt that the
workers run a step of its own: what fails whatever is asked of it convicts nobody.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

# A culprit was in flight in that many losses without getting any further, ...
MIN_LOSSES = 3
# ... that many of them with nothing else in flight: processes are killed for other reasons, too.
MIN_LOSSES_ALONE = 2

Suspect = TypeVar("Suspect", bound=Hashable)


@dataclass(slots=True)
class _Record:
    """A suspect's losses since it last made progress."""

    losses: int = 0
    losses_alone: int = 0
    end: int = 0  # tokens computed, with which it has got past all places where it was lost


class Suspects(Generic[Suspect]):
    """Sequences that were in flight when workers were lost, and have not got past that since."""

    def __init__(self) -> None:
        self._records: dict[Suspect, _Record] = {}
        self._groups: deque[list[Suspect]] = deque()  # the first is on trial; never an empty one

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[Suspect]:
        return iter(tuple(self._records))

    @property
    def on_trial(self) -> list[Suspect]:
        """The suspects that must be computed alone; empty if there is no trial."""
        return self._groups[0] if self._groups else []

    def lost(self, in_flight: Mapping[Suspect, int]) -> Suspect | None:
        """Takes note that the workers were lost.

        Args:
            in_flight: the sequences being computed, each with the number of tokens that it would
                have had computed.

        Returns:
            The culprit, if it is now known, which is then forgotten.
        """
        alone = len(in_flight) == 1
        for each, end in in_flight.items():
            record = self._records.setdefault(each, _Record())
            record.losses += 1
            record.losses_alone += alone
            record.end = max(record.end, end)
        if self._groups:
            group = self._groups[0]
            accused = [each for each in group if each in in_flight]
        else:
            group = accused = [each for each in in_flight if self._records[each].losses > 1]
        if not accused:
            return None
        if self._groups:
            self._groups.popleft()
        if len(accused) == 1 and self._is_convicted(accused[0]):
            culprit = accused[0]
            self.forget(culprit)
        else:
            culprit = None
        self._try_first([each for each in group if each not in in_flight])
        if culprit is None:
            middle = len(accused) // 2
            self._try_first(accused[middle:])
            self._try_first(accused[:middle])
        return culprit

    def passed(self, each: Suspect, num_tokens: int) -> None:
        """Takes note that `num_tokens` of a sequence, suspect or not, are computed."""
        record = self._records.get(each)
        if record is not None and num_tokens >= record.end:
            self.forget(each)

    def forget(self, each: Suspect) -> None:
        """Drops a suspect that is innocent or has ended."""
        self._records.pop(each, None)
        groups = [[other for other in group if other != each] for group in self._groups]
        self._groups = deque(filter(None, groups))

    def _try_first(self, group: list[Suspect]) -> None:
        if group:
            self._groups.appendleft(group)

    def _is_convicted(self, each: Suspect) -> bool:
        record = self._records[each]
        return record.losses >= MIN_LOSSES and record.losses_alone >= MIN_LOSSES_ALONE
