"""Finds the sequence that makes the workers fail, by group testing (Dorfman 1943; Hwang, "A method
for detecting all defective members").

Workers are lost for many reasons, and the sequences that they computed are rarely the reason. So
after a first loss all sequences run again. A sequence that makes progress is no longer under
suspicion. A sequence that was in two losses in a row is a suspect. Suspects are then tried in
halves. A half that makes progress is innocent. A half that is in another loss is halved again,
until one suspect is lost alone.

With n suspects, one culprit costs at most 3 + ceil(log2 n) losses, and k culprits cost at most k
times as many. Before each attempt but the first, the engine makes sure that the workers can run a
step of the engine's own. Workers that fail at every step therefore convict no sequence.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

_MIN_LOSSES_OF_SUSPECTS = 2
# A culprit was in at least this many losses without making progress.
MIN_LOSSES = 3
# A culprit was alone in at least this many of them; a single one may have had another reason.
MIN_LOSSES_ALONE = 2

Candidate = TypeVar("Candidate", bound=Hashable)


@dataclass(slots=True)
class _Record:
    """The losses that a candidate was in since it last made progress."""

    losses: int = 0
    losses_alone: int = 0
    goal: int = 0  # the candidate makes progress when it has this many tokens

    @property
    def is_guilty(self) -> bool:
        return self.losses >= MIN_LOSSES and self.losses_alone >= MIN_LOSSES_ALONE


class Suspects(Generic[Candidate]):
    """Sequences that were in flight when workers were lost, and have not been computed further."""

    def __init__(self) -> None:
        self._records: dict[Candidate, _Record] = {}
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
            record = self._records.setdefault(each, _Record())
            record.losses += 1
            record.losses_alone += len(in_flight) == 1
            record.goal = max(record.goal, end)
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
        """Chooses the groups of suspects to try next, one after the other.

        The suspects with the most losses were in the group that was tried last. Each half of that
        group is a new group. So at most half of them are in the next loss and then have the most
        losses.
        """
        losses = {each: record.losses for each, record in self._records.items()}
        most = max([_MIN_LOSSES_OF_SUSPECTS, *losses.values()])
        last_tried = [each for each, count in losses.items() if count == most]
        middle = len(last_tried) // 2
        self._groups = [group for group in (last_tried[:middle], last_tried[middle:]) if group]
