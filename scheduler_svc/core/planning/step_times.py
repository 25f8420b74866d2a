"""The time that steps take, learned while running: of decodes by their number of rows, and of
prompts by the context of their tokens."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter
from math import inf

from scheduler_svc.core.step import Step, StepTiming

# How far a new time moves what is known of all sizes, because contexts grow and the machine does
# other work, and of its own size alone. Geometric, so that halves and doubles weigh the same.
_SCALE_WEIGHT, _SIZE_WEIGHT = 0.1, 0.05
# A size's first times tell of that size alone, and their mean is taken. Shorter ones count for
# more, because the machine may have done other work during the others.
_NUM_FIRST, _FALL = 20, 0.5
_TOKEN_FALL, _TOKEN_RISE = 0.25, 0.1  # weights of shorter and longer times of prompts
_WAIT_WEIGHT = 0.1
_REMEMBERED = 1024  # steps of decodes, after which a size that none of them had is forgotten
_MAX_FACTOR = 4.0  # between the known time and one measurement, because machines pause
_MIN_S = 1e-7  # the minimum time of a token or a step
_MIN_GAIN = 1.1  # below which guesses are not worth the time that they take
# The part of a step's time that is due to its rows, before two sizes have shown it. With a quarter,
# likely drafts are tried once, and then the time of that step is known.
_UNKNOWN_PART = 0.25
USUAL_CONTEXT = 512  # tokens


class StepTimes:
    """Times in seconds. Those of decodes between known numbers of rows are interpolated. Those
    beyond lie on the line through two known numbers, of which one is at least twice the other. A
    number of rows that no step had for long is forgotten, because the machine may have done other
    work when it was measured. A prompt's tokens take longer with more tokens before them. Such
    contexts are grouped by the power of two below."""

    def __init__(self) -> None:
        self._scale = 1.0
        self._relative: dict[int, float] = {}  # seconds at a scale of 1, by number of rows
        self._counts: dict[int, int] = {}  # of measurements, by number of rows
        self._sizes: list[int] = []  # of these, ascending
        self._last_steps: dict[int, int] = {}  # by number of rows, the one with the oldest first
        self._num_steps = 0  # of decodes
        self._tokens: dict[int, float] = {}  # seconds of a prompt token, by group of its context
        self._num_drafted = 0  # steps with drafts since the last one without
        self._num_waits = 0
        self.wait_s = 0.0  # of the workers, for a step that is planned after the last answer

    def step_answered(self, step: Step, timing: StepTiming) -> None:
        """Learns from the time that a step took."""
        if len(step.rows) > step.num_decodes:
            self._learn_prompts(step, timing.took_s)
        else:
            self._learn_decodes(step, max(timing.took_s, _MIN_S), timing.gap_s)

    def max_drafts(self, num_seqs: int, room: int, *, waits: bool = False) -> int:
        """How many of up to `room` drafts may be worth their time in a step of sequences. Larger
        steps are tried in small increments: none has more than twice the rows of any step so far.

        The number is 0 where a step gains less than a tenth even if all drafts are right, as where
        its time is proportional to its rows. It is also 0 before any time is known, and when a step
        without drafts is to be measured again, lest drafts seem good for long because it was slow
        by chance. Each of its measurements is trusted for twice as many steps. Sequences of which
        each step `waits` for the last answer, drafts or not, lose nothing by that."""
        if not self._sizes or self._num_drafted >> self._counts.get(num_seqs, 0):
            return 0
        room = min(room, 2 * max(num_seqs, self._sizes[-1]) - num_seqs)
        alone_s = self.seconds_without(num_seqs)
        without_s = alone_s + (self.wait_s if waits else 0)
        for rows in {num_seqs + min(factor * num_seqs, room) for factor in (1, 3, 7)}:
            if rows * without_s > _MIN_GAIN * num_seqs * self.seconds_with(rows, alone_s):
                return room
        return 0

    def seconds_without(self, num_seqs: int) -> float:
        """The time of a step of sequences without drafts: not more than that of more rows."""
        larger = self._sizes[bisect_left(self._sizes, num_seqs) :]
        least = min(map(self._relative.__getitem__, larger), default=inf)
        return min(self.seconds(num_seqs), self._scale * least)

    def seconds_with(self, rows: int, alone_s: float) -> float:
        """The time of a step of so many rows, drafts among them, and of the wait for its answer.
        Without the drafts it takes `alone_s`."""
        return max(self.seconds(rows), alone_s) + self.wait_s

    def may_guess(self, rows: int) -> bool:
        """Whether steps were measured that had more than half as many rows."""
        return bool(self._sizes) and rows < 2 * self._sizes[-1]

    def seconds(self, rows: int) -> float:
        """The time of a step of this many decodes; 0 before the first step."""
        sizes, relative = self._sizes, self._relative
        if not sizes or not rows:
            return 0.0
        place = bisect_left(sizes, rows)
        if 0 < place < len(sizes):
            below, above = sizes[place - 1], sizes[place]
            share = (rows - below) / (above - below)
            return self._scale * (relative[below] + share * (relative[above] - relative[below]))
        if place:
            nearest, other = sizes[-1], bisect_right(sizes, sizes[-1] // 2) - 1
        else:  # the smallest known size, or below it
            nearest, other = sizes[0], bisect_left(sizes, 2 * sizes[0])
        return self._scale * (relative[nearest] + (rows - nearest) * self._slope(nearest, other))

    def seconds_of(self, step: Step) -> float:
        """The time of a step, as far as it is known."""
        return self.seconds(step.num_decodes) + self._prompts_s(_prompt_tokens(step))

    def prompt_token_s(self, context: int = USUAL_CONTEXT) -> float:
        """The time of a prompt token with `context` tokens before it; 0 before the first prompt."""
        return self._token_s(context.bit_length())

    def max_prompt_token_s(self, context: int) -> float:
        """A bound of `prompt_token_s`: of a context that was not measured, twice what is known."""
        size = context.bit_length()
        return self._token_s(size) * (1 if size in self._tokens else 2)

    def _learn_decodes(self, step: Step, took_s: float, gap_s: float) -> None:
        rows = step.num_decodes
        self._num_drafted = self._num_drafted + 1 if step.num_drafts else 0
        if gap_s > 0:
            self._num_waits += 1
            waited_s = min(gap_s, _MAX_FACTOR * (self.wait_s or took_s))
            self.wait_s += max(_WAIT_WEIGHT, 1 / self._num_waits) * (waited_s - self.wait_s)
        known_s = self.seconds(rows)
        if rows not in self._relative:
            seconds = min(took_s, _MAX_FACTOR * (known_s or inf))  # a machine may have paused
            insort(self._sizes, rows)
            self._relative[rows] = seconds / self._scale
            self._counts[rows] = 1
        else:
            self._counts[rows] += 1
            if step.num_drafts or not gap_s or took_s < known_s:  # else its way took time, too
                self._adjust(rows, _bounded(took_s / known_s))
        self._forget_others(rows)

    def _adjust(self, rows: int, factor: float) -> None:
        """Learns that a step took `factor` times what is known of its number of rows."""
        if self._counts[rows] > _NUM_FIRST:
            self._scale *= factor**_SCALE_WEIGHT
            self._relative[rows] *= factor**_SIZE_WEIGHT
        else:
            weight = 1 / self._counts[rows]
            self._relative[rows] *= factor ** (max(weight, _FALL) if factor < 1 else weight)

    def _forget_others(self, rows: int) -> None:
        """Forgets what was last measured long before this step, which had so many rows."""
        self._num_steps += 1
        self._last_steps.pop(rows, None)
        self._last_steps[rows] = self._num_steps
        oldest = next(iter(self._last_steps))
        if self._last_steps[oldest] <= self._num_steps - _REMEMBERED:
            del self._last_steps[oldest], self._relative[oldest], self._counts[oldest]
            self._sizes.remove(oldest)

    def _learn_prompts(self, step: Step, took_s: float) -> None:
        """Learns from what the step took longer than its decodes alone would have."""
        tokens = _prompt_tokens(step)
        seconds = max(took_s - self.seconds(step.num_decodes), _MIN_S)
        if not self._tokens:
            self._tokens = dict.fromkeys(tokens, seconds / tokens.total())
            return
        factor = _bounded(seconds / self._prompts_s(tokens))
        weight = _TOKEN_FALL if factor < 1 else _TOKEN_RISE
        self._tokens |= {
            size: self._token_s(size) * factor ** (weight if size in self._tokens else 1)
            for size in tokens
        }

    def _prompts_s(self, tokens: Counter[int]) -> float:
        return sum(count * self._token_s(size) for size, count in tokens.items())

    def _token_s(self, size: int) -> float:
        """The time of a token in this group of contexts, else in the next smaller known group, else
        in the next larger one."""
        if size in self._tokens or not self._tokens:
            return self._tokens.get(size, 0.0)
        below = [each for each in self._tokens if each < size]
        return self._tokens[max(below) if below else min(self._tokens)]

    def _slope(self, nearest: int, place: int) -> float:
        """The time of a row more or less than `nearest`, from the size at this place of the known
        sizes if there is one. It is at least 0, and at most `nearest`'s time per row."""
        relative = self._relative
        per_row = relative[nearest] / nearest
        if not 0 <= place < len(self._sizes):
            return _UNKNOWN_PART * per_row
        other = self._sizes[place]
        slope = (relative[nearest] - relative[other]) / (nearest - other)
        return min(max(slope, 0.0), per_row)


def _bounded(factor: float) -> float:
    return min(max(factor, 1 / _MAX_FACTOR), _MAX_FACTOR)


def _prompt_tokens(step: Step) -> Counter[int]:
    """The tokens of prompts in a step, by group of their context."""
    tokens = Counter[int]()
    for row in step.rows[step.num_decodes :]:
        tokens[(row.start + row.num_tokens).bit_length()] += row.num_tokens
    return tokens
