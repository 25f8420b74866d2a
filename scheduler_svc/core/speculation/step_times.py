"""The time that steps of decodes take by their number of rows, learned while running."""

from __future__ import annotations

from bisect import bisect_left, insort
from math import inf

from scheduler_svc.core.step import Step, StepTiming

# How far a new time moves what is known of all sizes, because contexts grow and the machine does
# other work, and of its own size alone. Geometric, so that halves and doubles weigh the same.
_PACE_WEIGHT, _SIZE_WEIGHT = 0.1, 0.05
_MAX_FACTOR = 4.0  # between the known time and one measurement, because machines pause
_WAIT_WEIGHT = 0.1
_MIN_GAIN = 1.1  # below which guesses are not worth the time that they take


class StepTimes:
    """Times in seconds. Unknown times are interpolated. Larger steps are tried in small increments:
    the time of a step with more than twice the rows of any step so far is infinite."""

    def __init__(self) -> None:
        self._pace = 1.0
        self._relative: dict[int, float] = {}  # seconds at a pace of 1, by number of rows
        self._sizes: list[int] = []  # of these, ascending
        self.wait_s = 0.0  # of the workers, for a step that is planned after the last answer

    def step_answered(self, step: Step, timing: StepTiming) -> None:
        """Learns from a step, unless it has prompts."""
        rows = len(step.rows)
        if rows != step.num_decodes or timing.took_s <= 0:
            return
        if step.num_drafts:
            self.wait_s += _WAIT_WEIGHT * (min(timing.gap_s, timing.took_s) - self.wait_s)
        if rows not in self._relative:
            insort(self._sizes, rows)
            self._relative[rows] = timing.took_s / self._pace
            return
        factor = timing.took_s / self.seconds(rows)
        factor = min(max(factor, 1 / _MAX_FACTOR), _MAX_FACTOR)
        self._pace *= factor**_PACE_WEIGHT
        self._relative[rows] *= factor**_SIZE_WEIGHT

    def may_gain(self, num_seqs: int) -> bool:
        """Whether steps of so many sequences gain at least a tenth from drafts that are always
        right. Where the time of a step is proportional to its rows, they gain nothing."""
        without_s = self.seconds(num_seqs)
        return not without_s or any(
            factor * without_s > _MIN_GAIN * (self.seconds(factor * num_seqs) + self.wait_s)
            for factor in (2, 4, 8)
        )

    def seconds(self, rows: int) -> float:
        """The time of a step of this many rows; 0 before the first step."""
        sizes, relative = self._sizes, self._relative
        if not sizes:
            return 0.0
        place = bisect_left(sizes, rows)
        if place == len(sizes):
            return self._pace * relative[sizes[-1]] if rows <= 2 * sizes[-1] else inf
        above = sizes[place]
        if above == rows or not place:
            return self._pace * relative[above]
        below = sizes[place - 1]
        share = (rows - below) / (above - below)
        return self._pace * (relative[below] + share * (relative[above] - relative[below]))
