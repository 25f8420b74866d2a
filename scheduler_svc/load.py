"""Measures how busy the engine has been over the last few seconds."""

from __future__ import annotations

import math

from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.step import Step, StepTiming

_WINDOW_S = 10.0
_MIN_RETRY_S, _MAX_RETRY_S = 0.1, 60.0
_UNKNOWN_RETRY_S = 1.0


class Load:
    """The load of a scheduler. Counts decay exponentially with their age, so that rates are over
    roughly the last `_WINDOW_S` seconds. Times are seconds of one clock and never decrease."""

    def __init__(self, scheduler: Scheduler, now: float) -> None:
        self._scheduler = scheduler
        self._start = self._last = now
        self._tokens = self._admissions = 0.0
        self._counted = (0, 0)

    def step_answered(self, _: Step, timing: StepTiming) -> None:
        """Counts a step, and the tokens and admissions since the previous step."""
        stats, now = self._scheduler.stats, timing.answered_at
        tokens, admissions = self._counted
        self._counted = (stats.sampled_tokens, stats.admissions)
        decay = self._decay(now)
        self._tokens = self._tokens * decay + stats.sampled_tokens - tokens
        self._admissions = self._admissions * decay + stats.admissions - admissions
        self._last = now

    def tokens_per_s(self, now: float) -> float:
        return self._per_second(self._tokens, now)

    def admissions_per_s(self, now: float) -> float:
        return self._per_second(self._admissions, now)

    @property
    def step_time_s(self) -> float:
        """Seconds that a decode of all running sequences takes; 0 if unknown. A pipeline takes as
        many steps as stages, if there are sequences for them."""
        scheduler, running = self._scheduler, max(self._scheduler.num_running, 1)
        num_steps = min(scheduler.num_stages, running)
        return num_steps * scheduler.step_times.seconds(math.ceil(running / num_steps))

    @property
    def prompt_token_s(self) -> float:
        """Seconds that a prompt token takes, including its share of the decodes in its step; 0 if
        unknown."""
        scheduler, times = self._scheduler, self._scheduler.step_times
        decodes_s = times.seconds(scheduler.num_running)
        token_s = times.prompt_token_s()
        return token_s and token_s + decodes_s / scheduler.limits.max_num_prefill_tokens

    def queue_s(self, now: float) -> float:
        """The seconds that a sequence arriving now would wait for another sequence to end."""
        scheduler, blocks = self._scheduler, self._scheduler.blocks
        is_short = scheduler.num_waiting > 0 and blocks.num_free_blocks < blocks.num_blocks // 16
        if scheduler.num_running < scheduler.limits.max_num_seqs and not is_short:
            return 0.0
        rate = self.admissions_per_s(now)
        if not rate:
            return _UNKNOWN_RETRY_S
        return min((scheduler.num_waiting + 1) / rate, _MAX_RETRY_S)

    def retry_after_s(self, now: float) -> float:
        """The seconds that a rejected request should wait. By then, at the current rate, a tenth of
        the queue has been admitted, so that requests rejected together find room."""
        rate = self.admissions_per_s(now)
        if not rate:
            return _UNKNOWN_RETRY_S
        return min(max(self._scheduler.num_waiting / 10 / rate, _MIN_RETRY_S), _MAX_RETRY_S)

    def _decay(self, now: float) -> float:
        return math.exp((self._last - now) / _WINDOW_S)

    def _per_second(self, count: float, now: float) -> float:
        # The window is not full at the start. A minimum of 1 s keeps one event from a high rate.
        seconds = _WINDOW_S * -math.expm1(-max(now - self._start, 1.0) / _WINDOW_S)
        return count * self._decay(now) / seconds
