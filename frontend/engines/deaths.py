"""The deaths of schedulers that a completion was in, and whether it is to blame.

A scheduler dies for many reasons, and rarely because of a completion. So after a first death all
completions are submitted again. A completion that was in two deaths without progress in between is
a suspect. Suspects are submitted one at a time, and the next one once the first has made progress
or has ended, or after a few seconds. A completion that was in three deaths is submitted alone: no
frontend has another completion at the scheduler (`ConnectAlone`). If that scheduler dies, too, the
completion is to blame.

Only a death in such a trial can convict. Two frontends whose suspects are submitted at the same
time see the same deaths, whichever completion causes them.
"""

from __future__ import annotations

from dataclasses import dataclass

# A completion makes progress with this many tokens from one scheduler. Fewer tokens may have been
# in flight to the frontend when a scheduler died, and then come from the next scheduler.
MIN_PROGRESS = 4
_MIN_DEATHS_OF_SUSPECTS = 2
MIN_DEATHS_BEFORE_ALONE = 3
# A trial takes up to 4 s, and twice as long after each death: beams end together, and prompts may
# be long. At first most suspects are innocent.
_MAX_LOG_SECONDS = 6


@dataclass(slots=True)
class DeathRecord:
    """The deaths that a completion was in since it last made progress."""

    count: int = 0
    goal: int = 0  # the completion makes progress when it has this many tokens
    survived: bool = False  # a trial, since the last death

    def add(self, num_tokens: int, *, alone: bool) -> bool:
        """Counts a death of the scheduler that had the completion.

        Args:
            num_tokens: that the completion has.
            alone: whether no other completion can be the reason.

        Returns:
            Whether the completion is to blame. It is not if it got a token while it was alone.
        """
        goal = num_tokens + MIN_PROGRESS
        is_to_blame = alone and goal == self.goal
        if num_tokens >= self.goal:
            self.count = 0
        self.count, self.goal, self.survived = self.count + 1, goal, False
        return is_to_blame

    @property
    def is_suspect(self) -> bool:
        """Whether the completion may only be submitted on trial."""
        return self.count >= _MIN_DEATHS_OF_SUSPECTS and not self.survived

    @property
    def must_be_alone(self) -> bool:
        """Whether no other completion may be at the scheduler meanwhile."""
        return self.is_suspect and self.count >= MIN_DEATHS_BEFORE_ALONE

    @property
    def trial_s(self) -> float:
        """The maximum duration of a trial, in seconds."""
        return 2.0 ** min(self.count, _MAX_LOG_SECONDS)
