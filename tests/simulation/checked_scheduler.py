"""The scheduler under observation."""

from __future__ import annotations

from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import Sequence, SequenceKey
from scheduler_svc.core.step import Answer, Output, Step


class CheckedScheduler(Scheduler):
    """A scheduler that counts answers and checks itself after each."""

    answered = 0  # steps since the cache was last lost

    def sequence(self, key: SequenceKey) -> Sequence:
        """Returns a sequence that has not ended."""
        return self._sequences[key]

    def apply(self, step: Step, answer: Answer) -> list[Output]:
        outputs = super().apply(step, answer)
        self.answered += 1
        self.check_integrity()
        return outputs

    def requeue_all(self) -> None:
        super().requeue_all()
        self.answered = 0
        self.check_integrity()
