"""Measures how busy the engine has been over the last few seconds."""

from __future__ import annotations

import math

from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.step import Step, StepTiming

_MIN_RETRY_S, _MAX_RETRY_S = 0.1, 60.0
_UNKNOWN_RETRY_S = 1.0


class Rate:
    """Events per second over roughly the last `window_s` seconds. The weight of an event decays
    exponentially with its age. Times are seconds of one clock and never decrease."""

    def __init__(self, now: float, window_s: float = 10.0) -> None:
        self._window_s = window_s
        self._start = self._last = now
        self._weight = 0.0

    def add(self, count: float, now: float) -> None:
        """Counts `count` events at `now`."""
        self._weight = self._decayed(now) + count
        self._last = now

    def per_second(self, now: float) -> float:
        # The window is not full at the start. A minimum of 1 s keeps one event from a high rate.
        seconds = self._window_s * -math.expm1(-max(now - self._start, 1.0) / self._window_s)
        return self._decayed(now) / seconds

    def _decayed(self, now: float) -> float:
        return self._weight * math.exp((self._last - now) / self._window_s)


class Load:
    """The load of a scheduler. `step_time_s` is averaged with the weights of the rates."""

    def __init__(self, scheduler: Scheduler, now: float) -> None:
        self._scheduler = scheduler
        self._tokens, self._admissions = Rate(now), Rate(now)
        self._steps, self._step_seconds = Rate(now), Rate(now)
        self._counted = (0, 0)

    def step_answered(self, _: Step, timing: StepTiming) -> None:
        """Counts a step, and the tokens and admissions since the previous step."""
        stats, now = self._scheduler.stats, timing.answered_at
        tokens, admissions = self._counted
        self._counted = (stats.sampled_tokens, stats.admissions)
        self._tokens.add(stats.sampled_tokens - tokens, now)
        self._admissions.add(stats.admissions - admissions, now)
        self._steps.add(1, now)
        self._step_seconds.add(timing.took_s, now)

    def tokens_per_s(self, now: float) -> float:
        return self._tokens.per_second(now)

    def step_time_s(self, now: float) -> float:
        steps = self._steps.per_second(now)
        return self._step_seconds.per_second(now) / steps if steps else 0.0

    def prompt_token_s(self) -> float:
        """Seconds that a prompt token takes, including its share of the decodes in its step; 0 if
        unknown."""
        scheduler = self._scheduler
        token_s = scheduler.pace.prompt_token_s
        decodes_s = scheduler.pace.decodes_s(scheduler.num_running)
        return token_s and token_s + decodes_s / scheduler.limits.max_num_prefill_tokens

    def queue_s(self, now: float) -> float:
        """The seconds that a sequence arriving now would wait for room."""
        if not self._is_full:
            return 0.0
        rate = self._admissions.per_second(now)
        if not rate:
            return _UNKNOWN_RETRY_S
        return min((self._scheduler.num_waiting + 1) / rate, _MAX_RETRY_S)

    def retry_after_s(self, now: float) -> float:
        """The seconds that a rejected request should wait. By then, at the current rate, a tenth of
        the queue has been admitted, so that requests rejected together find room."""
        rate = self._admissions.per_second(now)
        if not rate:
            return _UNKNOWN_RETRY_S
        return min(max(self._scheduler.num_waiting / 10 / rate, _MIN_RETRY_S), _MAX_RETRY_S)

    @property
    def _is_full(self) -> bool:
        """Whether a sequence arriving now would wait for another sequence to end."""
        scheduler, blocks = self._scheduler, self._scheduler.blocks
        is_short = scheduler.num_waiting > 0 and blocks.num_free_blocks < blocks.num_blocks // 16
        return scheduler.num_running >= scheduler.limits.max_num_seqs or is_short
