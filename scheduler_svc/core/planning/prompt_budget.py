"""The prompts' part of a step.

While several clients have requests, prompts get half of the time that a step's decodes take, or a
minimum. So one client's prompts slow another client's streams by about a third. The prompts of a
single client are limited only in their number of tokens, which computes more per second.
"""

from __future__ import annotations

from math import inf

from scheduler_svc.core.planning.step_times import StepTimes
from scheduler_svc.core.sequence import Sequence

_SHARED_S = 10.0  # without sequences of other clients, until a client counts as alone
_SHARE = 0.5  # of the time that decodes take, for prompts
_MIN_S = 0.005  # the minimum for prompts
_ALONE_S = 0.05  # the limit for prompts in a step without decodes
_MIN_TOKENS = 16  # of the first prompt in a step, so that it makes progress
_MEASURE_EVERY = 16  # steps, of which one has only decodes, to measure their time


class PromptBudget:
    """The tokens and the seconds that prompts may take in a step."""

    def __init__(self, times: StepTimes, tokens: int, seconds: float = inf) -> None:
        self._times = times
        self._tokens, self._seconds = tokens, seconds
        self._spent_tokens, self._spent_s = 0, 0.0

    def fits(self, seq: Sequence, part: float = 1.0) -> bool:
        """Whether all of a sequence's tokens fit into what is left of a part of the budget."""
        return self._room(seq, part) == seq.num_unscheduled_tokens

    def fits_partly(self, seq: Sequence) -> bool:
        """Whether there is room for any of a sequence's tokens."""
        return self._room(seq) > 0 or self.fits(seq)

    def take(self, seq: Sequence) -> int:
        """Spends the room that is left for a sequence, and returns it in tokens."""
        room = self._room(seq)
        self._spent_tokens += room
        self._spent_s += room * self._cost(seq, room)
        return room

    def _room(self, seq: Sequence, part: float = 1.0) -> int:
        room = min(int(part * self._tokens) - self._spent_tokens, seq.num_unscheduled_tokens)
        cost, left_s = self._cost(seq, room), part * self._seconds - self._spent_s
        if room * cost > left_s:
            min_tokens = 0 if self._spent_tokens or part < 1 else _MIN_TOKENS
            room = min(room, max(int(left_s / cost), min_tokens))
        return room

    def _cost(self, seq: Sequence, num_tokens: int) -> float:
        if self._seconds == inf:
            return 0.0
        return self._times.max_prompt_token_s(seq.num_scheduled_tokens + num_tokens)


class PromptBudgets:
    """Makes the budget of each step."""

    def __init__(self, times: StepTimes) -> None:
        self._times = times
        self._shared_until = 0.0
        self._since_measure = 0  # steps

    def budget(
        self, now: float, num_decodes: int, max_tokens: int, *, is_shared: bool
    ) -> PromptBudget:
        """The budget of the step being planned, of up to `max_tokens`, beside `num_decodes`
        decodes. `is_shared` says whether several clients have sequences. They may soon have some
        again after that, so it holds for another while."""
        times = self._times
        if is_shared:
            self._shared_until = now + _SHARED_S
        if now >= self._shared_until:
            return PromptBudget(times, max_tokens)
        if not num_decodes:
            return PromptBudget(times, max_tokens, _ALONE_S)
        self._since_measure += 1
        if self._since_measure > _MEASURE_EVERY or not times.may_guess(num_decodes):
            self._since_measure = 0
            return PromptBudget(times, 0)  # this step measures the decodes alone
        return PromptBudget(times, max_tokens, max(_SHARE * times.seconds(num_decodes), _MIN_S))
