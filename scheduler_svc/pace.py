"""Keeps streams at their pace while another client's prompts are read.

A prompt's token takes the longer the more come before it, and how long depends on the model and the
machine. So steps are timed. While several clients have requests, prompts get no more of a step than
the decodes take, or a little: it lasts about twice as long as without them, whatever their length.
A single client's prompts are only limited in tokens, which reads them sooner.
"""

from __future__ import annotations

from collections import Counter
from math import inf

from scheduler_svc.sequence import Sequence
from scheduler_svc.step import Step

_MIN_S = 0.01  # for prompts, where decodes take less
_MIN_TOKENS = 16  # of the first prompt in a step, so that it gets on
_WEIGHT = 0.25  # of a new measurement
_MAX_FACTOR = 4.0  # between what was known and one measurement: machines pause
_LEAST_S = 1e-7  # of a token or a step


class Pace:
    """Times that steps took. Decodes and contexts are told apart by the power of two below."""

    def __init__(self) -> None:
        self._steps: dict[int, float] = {}  # seconds of steps of decodes only, by their number
        self._tokens: dict[int, float] = {}  # seconds of a prompt's token, by its context

    def measured(self, step: Step, seconds: float) -> None:
        """Takes in the time from the previous step's answer to this one's."""
        num_decodes, prompts = step.num_decodes, step.rows[step.num_decodes :]
        if not prompts:
            _learn(self._steps, num_decodes.bit_length(), seconds)
            return
        if num_decodes:
            seconds -= _nearest(self._steps, num_decodes.bit_length()) or 0.0
        tokens = Counter[int]()
        for row in prompts:
            tokens[(row.start + row.num_tokens).bit_length()] += row.num_tokens
        known = {size: _nearest(self._tokens, size) or 1.0 for size in tokens}
        scale = seconds / sum(known[size] * count for size, count in tokens.items())
        for size in tokens:
            _learn(self._tokens, size, known[size] * scale)

    def seconds_for_prompts(self, num_decodes: int) -> float:
        """The seconds that prompts may take of a step with so many decodes."""
        seconds = _nearest(self._steps, num_decodes.bit_length())
        return inf if seconds is None else max(seconds, _MIN_S)

    def seconds_per_token(self, context: int) -> float:
        """The seconds that a prompt's token takes with `context` tokens before it."""
        return _nearest(self._tokens, context.bit_length()) or 0.0


class PromptBudget:
    """The tokens, and the seconds, that prompts have in a step."""

    def __init__(
        self, pace: Pace, tokens: int, seconds: float = inf, whole: PromptBudget | None = None
    ) -> None:
        self._pace = pace
        self._tokens = tokens
        self._seconds = seconds
        self._whole = whole
        self._min_tokens = 0 if whole else _MIN_TOKENS

    def half(self) -> PromptBudget:
        """Half of it; what that spends is spent of the whole, too."""
        return PromptBudget(self._pace, self._tokens // 2, self._seconds / 2, self)

    def holds(self, seq: Sequence) -> bool:
        """Whether there is room for all of a sequence's tokens."""
        return self._room(seq) == seq.num_unscheduled_tokens

    def holds_part(self, seq: Sequence) -> bool:
        """Whether there is room for any of a sequence's tokens."""
        return self._room(seq) > 0 or self.holds(seq)

    def take(self, seq: Sequence) -> int:
        """Spends the room that there is for a sequence, and returns it in tokens."""
        room = self._room(seq)
        self._spend(room, room * self._cost(seq, room))
        return room

    def _room(self, seq: Sequence) -> int:
        room = min(self._tokens, seq.num_unscheduled_tokens)
        cost = self._cost(seq, room)
        if room * cost > self._seconds:
            room = min(room, max(int(self._seconds / cost), self._min_tokens))
        return room

    def _cost(self, seq: Sequence, num_tokens: int) -> float:
        if self._seconds == inf:
            return 0.0
        return self._pace.seconds_per_token(seq.num_scheduled_tokens + num_tokens)

    def _spend(self, tokens: int, seconds: float) -> None:
        self._tokens -= tokens
        self._seconds = max(self._seconds - seconds, 0.0)
        if tokens:
            self._min_tokens = 0
        if self._whole:
            self._whole._spend(tokens, seconds)


def _learn(times: dict[int, float], size: int, seconds: float) -> None:
    known = _nearest(times, size)
    if known is None:
        known = max(seconds, _LEAST_S)
    bounded = min(max(seconds, known / _MAX_FACTOR), known * _MAX_FACTOR)
    times[size] = known + _WEIGHT * (bounded - known)


def _nearest(times: dict[int, float], size: int) -> float | None:
    """The time for a size, or what is known of the next smaller one, else of the next larger."""
    if size in times or not times:
        return times.get(size)
    below = [each for each in times if each < size]
    return times[max(below) if below else min(times)]
