"""Which of several candidates is to blame for deaths: group testing (Dorfman 1943; Hwang, "A method
for detecting all defective members").

A process dies for many reasons, mostly not for what it was asked to compute. So after a first death
everything is computed again as if nothing had happened, and whatever makes progress is no candidate
any more. What was in two deaths in a row is a suspect. Suspects are tried in halves: a half that
gets through is innocent, one that is in another death is halved again, down to the suspect that
dies alone.

With n suspects one culprit costs at most 3 + ceil(log2 n) deaths, and k culprits at most k times
that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

_MIN_LOSSES_OF_SUSPECTS = 2
# A culprit was in that many deaths without making progress, ...
MIN_LOSSES = 3
# ... that many of them with nothing else there: processes are killed for other reasons, too.
MIN_LOSSES_ALONE = 2

Candidate = TypeVar("Candidate")


@dataclass(slots=True)
class Record:
    """The deaths that a candidate was in since it last made progress."""

    losses: int = 0
    losses_alone: int = 0
    goal: int = 0  # tokens with which it will have made progress

    def lost(self, goal: int, *, alone: bool) -> None:
        """Counts a death; `alone`: nothing else can be the reason."""
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
    """The suspects to try next, one group after the other, given the losses of all.

    Those with the most losses were in the group that was tried last. Each half of them is a group:
    no more than half of them are in the next death, and then have one more than the others.
    """
    most = max(losses.values(), default=0)
    last_tried = [candidate for candidate, count in losses.items() if count == most]
    middle = len(last_tried) // 2
    return [group for group in (last_tried[:middle], last_tried[middle:]) if group]
