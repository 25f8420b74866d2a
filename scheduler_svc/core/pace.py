"""Keeps one client's streams at their pace, whatever other clients compute.

A prompt token takes longer with more tokens before it, and a step takes longer with more decodes.
How long depends on the model and the machine, so steps are timed. Shorter times count for more,
because the machine may do other work meanwhile. While several clients have requests, prompts get
half of the time that a step's decodes take, or a minimum.

Decodes take turns if a step with all of them takes long. It must also take more than twice as long
as the decodes of the client with the fewest, which are in every step. The steps of a single client
are limited only in their number of tokens, which computes more per second.
"""

from __future__ import annotations

from collections import Counter
from math import inf

from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.step import Step, StepTiming

_SHARED_S = 10.0  # without sequences of other clients, until a client counts as alone
_SHARE = 0.5  # of the time that decodes take, for prompts
_MIN_S = 0.005  # the minimum for prompts
_LONG_S = 0.05  # a long time for decodes, and the limit for prompts in a step without decodes
_MAX_COST = 1.25  # limit on the growth of the time per token by turns
_DECAY = 0.9999  # per step, of a time that excludes decodes, so that it is measured again
_MIN_TOKENS = 16  # of the first prompt in a step, so that it makes progress
_MEASURE_EVERY = 16  # steps, of which one has only decodes, to measure their time
_FALL = 0.25  # weight of a new measurement if it is shorter than the known time
_RISE = 0.1  # its weight if it is longer, perhaps because of the machine's other work
_MAX_FACTOR = 4.0  # between the known time and one measurement, because machines pause
_LEAST_S = 1e-7  # the minimum time of a token or a step
_USUAL_CONTEXT = 512  # tokens


class Pace:
    """The times of steps, and the limits that follow from them. Numbers of decodes and lengths of
    contexts are grouped by the power of two below."""

    # Seconds that a run may take. Longer steps gain nothing from runs, and drafts need the answers.
    max_run_s = 0.02

    def __init__(self) -> None:
        self._steps: dict[int, float] = {}  # seconds of a step of decodes, by their number
        self._tokens: dict[int, float] = {}  # seconds of a prompt token, by its context
        self.is_shared = False  # several clients have sequences, or had a moment ago
        self._shared_until = 0.0
        self._turn = 0
        self._since_measure = 0  # steps

    def step_answered(self, step: Step, timing: StepTiming) -> None:
        """Learns from the time that a step took."""
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

    def begin_step(self, now: float, *, shared: bool) -> None:
        """Notes whether several clients have sequences, or had a moment ago and may soon again."""
        if shared:
            self._shared_until = now + _SHARED_S
        self.is_shared = now < self._shared_until

    def decodes(self, decodes: list[Sequence]) -> list[Sequence]:
        """Returns the decodes whose turn it is, in unchanged order."""
        if not self.is_shared:
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
                first = self._turn * share % count  # of those whose last turn was in one step
                its = its[first:] + its[:first]
                out.update(sorted(its, key=lambda seq: seq.last_step)[share:])
        return [seq for seq in decodes if seq not in out]

    def _max_decodes(self, counts: Counter[str]) -> int:
        """The number of decodes that a step has room for. It is enough for each client to have as
        many as the client with the fewest. It is the number of all decodes if a smaller step would
        compute too few per second."""
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
        """The seconds that `num_decodes` decodes take; 0 if unknown."""
        return (num_decodes and _nearest(self._steps, num_decodes.bit_length())) or 0.0

    def run_length(self, step: Step, max_steps: int) -> int:
        """How many steps may have the same decodes as `step`, which has been planned."""
        seqs = [row.seq for row in step.rows]
        seconds = self.decodes_s(len(seqs))
        if (
            self.is_shared
            or not seconds
            or step.num_drafts
            or step.num_decodes < len(seqs)
            # The workers do not know what rows after this step need.
            or any(
                seq.params.stepwise
                or seq.num_scheduled_tokens < seq.num_prompt_tokens + seq.params.min_tokens
                for seq in seqs
            )
        ):
            return 1
        left = min(seq.max_scheduled_tokens - seq.num_scheduled_tokens for seq in seqs)
        return min(max_steps, 1 + left, int(self.max_run_s / seconds))

    @property
    def prompt_token_s(self) -> float:
        """The seconds that a prompt token usually takes; 0 if unknown."""
        return _nearest(self._tokens, _USUAL_CONTEXT.bit_length()) or 0.0

    def prompt_budget(self, num_decodes: int, max_tokens: int) -> PromptBudget:
        """The budget of prompts in the step being planned, beside `num_decodes` decodes."""
        if not self.is_shared:
            return PromptBudget(self, max_tokens)
        if not num_decodes:
            return PromptBudget(self, max_tokens, _LONG_S)
        seconds = self._steps.get(num_decodes.bit_length())
        self._since_measure += 1
        if seconds is None or self._since_measure > _MEASURE_EVERY:
            self._since_measure = 0
            return PromptBudget(self, 0)  # this step measures the decodes alone
        return PromptBudget(self, max_tokens, max(_SHARE * seconds, _MIN_S))

    def seconds_per_token(self, context: int) -> float:
        """The seconds that a prompt token takes with `context` tokens before it."""
        size = context.bit_length()
        seconds = _nearest(self._tokens, size) or 0.0
        return seconds if size in self._tokens else 2 * seconds  # a bound: as for twice the context


class PromptBudget:
    """The tokens and the seconds that prompts may take in a step."""

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
    """The time for a size, else for the next smaller known size, else for the next larger one."""
    if size in times or not times:
        return times.get(size)
    below = [each for each in times if each < size]
    return times[max(below) if below else min(times)]
