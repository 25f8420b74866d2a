"""Measures how busy the engine is, over the last few seconds."""

from __future__ import annotations

from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.rate import Rate

_MIN_RETRY_S, _MAX_RETRY_S = 0.1, 60.0
_UNKNOWN_RETRY_S = 1.0


class Load:
    """Watches a scheduler. Call `update` after every step.

    `step_time_s` is the time from the previous answer, or from sending the step if that was later,
    to its answer, averaged as the rates are.
    """

    def __init__(self, scheduler: Scheduler, now: float) -> None:
        self._scheduler = scheduler
        self._tokens, self._admissions = Rate(now), Rate(now)
        self._steps, self._step_seconds = Rate(now), Rate(now)
        self._counted = (0, 0)

    def update(self, step_time_s: float, now: float) -> None:
        stats = self._scheduler.stats
        tokens, admissions = self._counted
        self._counted = (stats.sampled_tokens, stats.admissions)
        self._tokens.add(stats.sampled_tokens - tokens, now)
        self._admissions.add(stats.admissions - admissions, now)
        self._steps.add(1, now)
        self._step_seconds.add(step_time_s, now)

    def tokens_per_s(self, now: float) -> float:
        return self._tokens.per_second(now)

    def step_time_s(self, now: float) -> float:
        steps = self._steps.per_second(now)
        return self._step_seconds.per_second(now) / steps if steps else 0.0

    def queue_s(self, now: float) -> float:
        """The seconds until a sequence that came now would be admitted, for want of room."""
        if not self._scheduler.is_full:
            return 0.0
        rate = self._admissions.per_second(now)
        if not rate:
            return _UNKNOWN_RETRY_S
        return min((self._scheduler.num_waiting + 1) / rate, _MAX_RETRY_S)

    def retry_after_s(self, now: float) -> float:
        """The seconds that a refused request should wait: until a tenth of the queue has been
        admitted at the current rate, so that requests refused together find room."""
        rate = self._admissions.per_second(now)
        if not rate:
            return _UNKNOWN_RETRY_S
        return min(max(self._scheduler.num_waiting / 10 / rate, _MIN_RETRY_S), _MAX_RETRY_S)
