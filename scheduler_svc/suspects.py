"""Sequences that may make the workers fail, computed again in the groups of `shared.suspects`.

Before each attempt but the first, the engine makes sure that the workers can run a step of the
engine's own. Workers that fail at every step therefore convict no sequence.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from typing import Generic, TypeVar

from shared.suspects import Record, next_groups

Candidate = TypeVar("Candidate", bound=Hashable)


class Suspects(Generic[Candidate]):
    """Sequences that were in flight when workers were lost, and have not been computed further."""

    def __init__(self) -> None:
        self._records: dict[Candidate, Record] = {}
        self._groups: list[list[Candidate]] = []  # the first is on trial; none is empty

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[Candidate]:
        return iter(tuple(self._records))

    @property
    def on_trial(self) -> list[Candidate]:
        """The suspects that must be computed with nothing else; empty if there is no trial."""
        return self._groups[0] if self._groups else []

    def lost(self, in_flight: Mapping[Candidate, int]) -> Candidate | None:
        """Counts a loss of the workers.

        Args:
            in_flight: the sequences in flight, each with the number of its tokens that would have
                been computed.

        Returns:
            The culprit, if it is now known. It is no longer a suspect.
        """
        for each, end in in_flight.items():
            record = self._records.setdefault(each, Record())
            record.lost(end, alone=len(in_flight) == 1)
        culprit = next((each for each in in_flight if self._records[each].is_guilty), None)
        if culprit is not None:
            del self._records[culprit]
        self._regroup()
        return culprit

    def passed(self, each: Candidate, num_tokens: int) -> None:
        """Notes that `num_tokens` tokens of a sequence, suspect or not, are computed."""
        record = self._records.get(each)
        if record is not None and num_tokens >= record.goal:
            self.forget(each)

    def forget(self, each: Candidate) -> None:
        """Drops a suspect that is innocent or has ended."""
        self._records.pop(each, None)
        groups = ([other for other in group if other != each] for group in self._groups)
        self._groups = [group for group in groups if group]
        if not self._groups:
            self._regroup()

    def _regroup(self) -> None:
        records = self._records.items()
        self._groups = next_groups({each: r.losses for each, r in records if r.is_suspect})
