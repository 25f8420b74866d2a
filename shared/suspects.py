"""Finds the candidate that kills a process, by group testing (Dorfman 1943; Hwang, "A method for
detecting all defective members").

A process dies for many reasons, and the work that it was given is rarely the reason. So after a
first death all candidates run again. A candidate that makes progress is no longer under suspicion.
A candidate that was in two deaths in a row is a suspect. Suspects are then tried in halves. A half
that makes progress is innocent. A half that is in another death is halved again, until one suspect
dies alone.

With n suspects, one culprit costs at most 3 + ceil(log2 n) deaths, and k culprits cost at most k
times as many.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

_MIN_LOSSES_OF_SUSPECTS = 2
# A culprit was in at least this many deaths without making progress.
MIN_LOSSES = 3
# A culprit was alone in at least this many of them; a single one may have had another reason.
MIN_LOSSES_ALONE = 2

Candidate = TypeVar("Candidate")


@dataclass(slots=True)
class Record:
    """The deaths that a candidate was in since it last made progress."""

    losses: int = 0
    losses_alone: int = 0
    goal: int = 0  # the candidate makes progress when it has this many tokens

    def lost(self, goal: int, *, alone: bool) -> None:
        """Counts a death; `alone`: no other candidate can be the reason."""
        self.losses += 1
        self.losses_alone += alone
        self.goal = max(self.goal, goal)

    @property
    def is_suspect(self) -> bool:
        return self.losses >= _MIN_LOSSES_OF_SUSPECTS

    @property
    def is_guilty(self) -> bool:
        return self.losses >= MIN_LOSSES and self.losses_alone >= MIN_LOSSES_ALONE


def next_groups(losses: Mapping[Candidate, int]) -> list[list[Candidate]]:
    """The groups of suspects to try next, one after the other, given the losses of all suspects.

    The suspects with the most losses were in the group that was tried last. Each half of that group
    is a new group. So at most half of them are in the next death and then have the most losses.
    """
    most = max(losses.values(), default=0)
    last_tried = [candidate for candidate, count in losses.items() if count == most]
    middle = len(last_tried) // 2
    return [group for group in (last_tried[:middle], last_tried[middle:]) if group]
