"""The scheduler, with an eye on it."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from scheduler_svc.scheduler import Output, Scheduler, Step


class CheckedScheduler(Scheduler):
    """Checks itself after every answer and counts them."""

    answered = 0  # steps, since the cache was lost
    losses_in_a_row = 0  # epochs that were lost since a step was answered; the workers count

    def apply(self, step: Step, token_ids: Seq[int]) -> list[Output]:
        outputs = super().apply(step, token_ids)
        self.answered += 1
        self.losses_in_a_row = 0
        self.check_integrity()
        return outputs

    def requeue_all(self) -> None:
        super().requeue_all()
        self.answered = 0
        self.check_integrity()
