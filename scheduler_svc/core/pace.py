"""Keeps one client's streams at their pace, whatever another has computed.

A prompt's token takes the longer the more come before it, and a step the longer the more decode in
it; how long depends on the model and the machine. So steps are timed; shorter times count for more,
since the machine may do other things meanwhile. While several clients have requests, prompts get
half as long of a step as the decodes take, or a little. And where so many decode that a step takes
long, and longer than twice what the client with the fewest would need alone, the others' decodes
take turns. A single client's are limited in number only, which computes more.
"""

from __future__ import annotations

from collections import Counter
from math import inf

from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.step import Step, StepTiming

_SHARED_S = 10.0  # after which a client is alone that others no longer send anything beside
_SHARE = 0.5  # of the time that decodes take, for prompts
_MIN_S = 0.005  # for prompts at least
_LONG_S = 0.05  # for decodes, or for prompts alone
_MAX_COST = 1.25  # in time per token, of turns
_DECAY = 0.9999  # of a time that keeps decodes out, per step, so that it is measured again
_MIN_TOKENS = 16  # of the first prompt in a step, so that it gets on
_MEASURE_EVERY = 16  # steps: one of decodes alone, to know what they take
_FALL = 0.25  # weight of a new measurement if it is shorter than what was known
_RISE = 0.1  # its weight if it is longer: that may be what else the machine does
_MAX_FACTOR = 4.0  # between what was known and one measurement: machines pause
_LEAST_S = 1e-7  # of a token or a step
_USUAL_CONTEXT = 512  # tokens


class Pace:
    """Times that steps took. Decodes and contexts are told apart by the power of two below."""

    def __init__(self) -> None:
        self._steps: dict[int, float] = {}  # seconds of steps of decodes only, by their number
        self._tokens: dict[int, float] = {}  # seconds of a prompt's token, by its context
        self._is_shared = False
        self._shared_until = 0.0
        self._turn = 0
        self._since_measure = 0  # steps

    def step_answered(self, step: Step, timing: StepTiming) -> None:
        """Takes in the time that a step took."""
        seconds, decodes, tokens = timing.took_s, step.num_decodes.bit_length(), _tokens_of(step)
        if not tokens:
            _learn(self._steps, decodes, seconds)
            return
        if decodes:
            seconds -= _nearest(self._steps, decodes) or 0.0
        each = {size: _nearest(self._tokens, size) or 0.0 for size in tokens}
        prompts_s = sum(each[size] * count for size, count in tokens.items())
        for size in tokens:
            value = each[size] * seconds / prompts_s if prompts_s else seconds / tokens.total()
            _learn(self._tokens, size, value)

    def begin_step(self, num_clients: int, now: float) -> None:
        """Takes note of the clients that have sequences, or had a moment ago and may soon again."""
        if num_clients > 1:
            self._shared_until = now + _SHARED_S
        self._is_shared = now < self._shared_until

    def decodes(self, decodes: list[Sequence]) -> list[Sequence]:
        """Those of a step's possible decodes that have their turn, in the same order."""
        if not self._is_shared:
            return decodes
        counts = Counter(seq.request.client.name for seq in decodes)
        room = self._max_decodes(counts) if len(counts) > 1 else len(decodes)
        if room >= len(decodes):
            return decodes
        self._turn += 1
        out = set[Sequence]()
        for place, (name, count) in enumerate(sorted(counts.items(), key=lambda each: each[1])):
            share = room // (len(counts) - place)
            room -= min(share, count)
            if count > share:
                its = [seq for seq in decodes if seq.request.client.name == name]
                first = self._turn * share % count  # of those that had their last turn together
                its = its[first:] + its[:first]
                out.update(sorted(its, key=lambda seq: seq.last_step)[share:])
        return [seq for seq in decodes if seq not in out]

    def _max_decodes(self, counts: Counter[str]) -> int:
        """The decodes that a step has room for, at least as many of each client as of the one with
        the fewest; all of them if fewer would not be as many per second."""
        num_decodes, fewest = counts.total(), min(counts.values())
        size = num_decodes.bit_length()
        least, most = (_nearest(self._steps, n) or 0.0 for n in (fewest.bit_length(), size))
        limit = max(2 * least, _LONG_S)
        if most <= limit:
            return num_decodes
        self._steps[size] = most * _DECAY
        for fewer in range(size - 1, (fewest * len(counts)).bit_length() - 1, -1):
            room, guess = (1 << fewer) - 1, least + (most - least) / (1 << (size - fewer))
            seconds = self._steps.get(fewer, guess)
            if seconds / room > _MAX_COST * most / num_decodes:
                break
            if seconds <= limit:
                return room
        return num_decodes

    def seconds(self, step: Step) -> float:
        """The seconds that a step takes, as far as they are known."""
        seconds = self.decodes_s(step.num_decodes)
        for size, count in _tokens_of(step).items():
            seconds += count * (_nearest(self._tokens, size) or 0.0)
        return seconds

    def decodes_s(self, num_decodes: int) -> float:
        """The seconds that so many decodes take, 0 if that is not known."""
        return (num_decodes and _nearest(self._steps, num_decodes.bit_length())) or 0.0

    @property
    def prompt_token_s(self) -> float:
        """The seconds that a prompt's token usually takes, 0 if that is not known."""
        return _nearest(self._tokens, _USUAL_CONTEXT.bit_length()) or 0.0

    def prompt_budget(self, num_decodes: int, max_tokens: int) -> PromptBudget:
        """What prompts may take of the step being planned, beside so many decodes."""
        if not self._is_shared:
            return PromptBudget(self, max_tokens)
        if not num_decodes:
            return PromptBudget(self, max_tokens, _LONG_S)
        seconds = self._steps.get(num_decodes.bit_length())
        self._since_measure += 1
        if seconds is None or self._since_measure > _MEASURE_EVERY:
            self._since_measure = 0
            return PromptBudget(self, 0)  # the decodes are to be measured alone
        return PromptBudget(self, max_tokens, max(_SHARE * seconds, _MIN_S))

    def seconds_per_token(self, context: int) -> float:
        """The seconds that a prompt's token takes with `context` tokens before it."""
        size = context.bit_length()
        seconds = _nearest(self._tokens, size) or 0.0
        return seconds if size in self._tokens else 2 * seconds  # as for twice the context, at most


class PromptBudget:
    """The tokens, and the seconds, that prompts have in a step."""

    def __init__(self, pace: Pace, tokens: int, seconds: float = inf) -> None:
        self._pace = pace
        self._tokens, self._seconds = tokens, seconds
        self._spent_tokens, self._spent_s = 0, 0.0

    def fits(self, seq: Sequence, part: float = 1.0) -> bool:
        """Whether all of a sequence's tokens fit into what is left of a part of the budget."""
        return self._room(seq, part) == seq.num_unscheduled_tokens

    def fits_partly(self, seq: Sequence) -> bool:
        """Whether there is room for any of a sequence's tokens."""
        return self._room(seq) > 0 or self.fits(seq)

    def take(self, seq: Sequence) -> int:
        """Spends the room that there is for a sequence, and returns it in tokens."""
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
        return self._pace.seconds_per_token(seq.num_scheduled_tokens + num_tokens)


def _tokens_of(step: Step) -> Counter[int]:
    """The tokens of prompts in a step, by the size of their context."""
    tokens = Counter[int]()
    for row in step.rows[step.num_decodes :]:
        tokens[(row.start + row.num_tokens).bit_length()] += row.num_tokens
    return tokens


def _learn(times: dict[int, float], size: int, seconds: float) -> None:
    known = _nearest(times, size) or max(seconds, _LEAST_S)
    bounded = min(max(seconds, known / _MAX_FACTOR), known * _MAX_FACTOR)
    weight = _RISE if bounded > known else _FALL
    times[size] = known + weight * (bounded - known) if size in times else bounded


def _nearest(times: dict[int, float], size: int) -> float | None:
    """The time for a size, or what is known of the next smaller one, else of the next larger."""
    if size in times or not times:
        return times.get(size)
    below = [each for each in times if each < size]
    return times[max(below) if below else min(times)]
