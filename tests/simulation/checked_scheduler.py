"""The scheduler under observation."""

from __future__ import annotations

from array import array
from weakref import WeakKeyDictionary

from scheduler_svc.core.admission import Limits
from scheduler_svc.core.blocks.block_manager import BlockManager
from scheduler_svc.core.planning.speculation import Speculation
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import Sequence, SequenceKey
from scheduler_svc.core.step import Answer, Output, Step


class CheckedScheduler(Scheduler):
    """A scheduler that counts answers, checks itself after each, and computes nothing twice."""

    def __init__(
        self,
        limits: Limits,
        blocks: BlockManager,
        speculation: Speculation | None = None,
        num_stages: int = 1,
    ) -> None:
        super().__init__(limits, blocks, speculation, num_stages)
        self.max_run_s = 100.0  # so that no run takes too long
        self.answered = 0  # steps since the workers were last lost
        self.cache_is_kept = False  # whether they came back with their cache
        self.num_copied_again = 0  # at the last loss
        # Each sequence's answered tokens, and its block tables, which preemption replaces.
        self._known: WeakKeyDictionary[Sequence, tuple[int, list[array[int]]]]
        self._known = WeakKeyDictionary()
        self._last_steps: WeakKeyDictionary[Sequence, int] = WeakKeyDictionary()

    def sequence(self, key: SequenceKey) -> Sequence:
        """Returns a sequence that has not ended."""
        return self._sequences[key]

    def schedule(self, now: float = 0.0) -> Step | None:
        step = super().schedule(now)
        for row in step.rows if step else ():
            in_flight = self._last_steps.get(row.seq, 0) > self._open.last_answered
            assert not in_flight or self.num_stages == 1, f"{row.seq.key} is in two steps in flight"
            self._last_steps[row.seq] = step.number if step else 0
            known, tables = self._known.get(row.seq, (0, row.seq.blocks.tables))
            if tables is row.seq.blocks.tables:
                assert row.start >= known, f"{row.seq.key}: position {row.start} again, of {known}"
        return step

    def apply(self, step: Step, answer: Answer) -> list[Output]:
        outputs = super().apply(step, answer)
        self.answered += 1
        self.check_integrity()
        for row in step.rows:
            if row.draft is None or row.start < row.seq.num_computed_tokens:
                self._known[row.seq] = row.start + row.num_tokens, row.seq.blocks.tables
        return outputs

    def rewind_all(self) -> None:
        running = [*self._running]
        num_new = len(self.blocks._copies)
        super().rewind_all()
        self.num_copied_again = len(self.blocks._copies) - num_new
        assert [*self._running] == running, "a rewound sequence does not run any more"
        self.check_integrity()

    def requeue_all(self) -> None:
        assert not self.cache_is_kept, "queues all again, though the cache is kept"
        super().requeue_all()
        self.check_integrity()

    def recovered(self, *, kept: bool) -> None:
        """Notes that the workers are back."""
        self.answered = 0
        self.cache_is_kept = kept
