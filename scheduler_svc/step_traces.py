"""The engine's spans in the traces of requests: time in the queue, some steps, and recoveries.

A step serves many requests, so it has a span in the trace of each traced request. Below that span
is one span for each rank that ran the step. A request's first steps have spans, and so do its
first steps after a loss of workers. After these, one step in `_EVERY` has a span.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from scheduler_svc.core.sequence import Row, Sequence, Status
from scheduler_svc.core.step import Step, StepTiming
from shared.telemetry.tracing import Tracing

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import Span

_FIRST_STEPS = 8
_EVERY = 16
_MAX_SPANS = 16  # of a step


class StepTraces:
    """Traces the sequences that are added. Without `tracing`, nothing is traced."""

    def __init__(self, tracing: Tracing | None) -> None:
        self._tracing = tracing
        # The number of steps of each traced sequence, counted from 1 again after a loss.
        self._num_steps: WeakKeyDictionary[Sequence, int] = WeakKeyDictionary()
        self._spans: dict[Step, list[Span]] = {}  # of steps in flight

    @property
    def active(self) -> bool:
        """Whether a sequence that has not ended is traced."""
        return bool(self._num_steps)

    def add(self, seq: Sequence) -> None:
        """Traces a sequence that has been queued, if it comes with a trace."""
        if self._tracing and seq.request.traceparent:
            self._num_steps[seq] = 0

    def begin(self, step: Step) -> None:
        """Begins the spans of a step that is about to be sent. The ranks add spans below them."""
        if not self._num_steps or not self._tracing:
            return
        spans = [span for row in step.rows if (span := self._begin_row(step, row))][:_MAX_SPANS]
        if spans:
            self._spans[step] = spans
            step.traceparents = [self._tracing.traceparent(span) for span in spans]

    def _begin_row(self, step: Step, row: Row) -> Span | None:
        seq, request, tracing = row.seq, row.seq.request, self._tracing
        number = self._num_steps.get(seq)
        if number is None or tracing is None:
            return None
        if number == 0:
            resubmitted = request.resubmitted
            tracing.add("queue", request.traceparent, request.arrival, resubmitted=resubmitted)
        self._num_steps[seq] = number + 1
        if number >= _FIRST_STEPS and number % _EVERY:
            return None
        return tracing.begin(
            "step",
            request.traceparent,
            number=step.number,
            position=row.start,
            tokens=row.num_tokens,
            sequences_of_step=len(step.rows),
            tokens_of_step=step.num_tokens,
        )

    def step_answered(self, step: Step, _: StepTiming) -> None:
        """Ends the spans of a step that has been answered."""
        for span in self._spans.pop(step, ()):
            span.end()

    def lost(self, reason: str) -> None:
        """Ends the spans of all steps in flight, which failed."""
        for spans in self._spans.values():
            for span in spans:
                span.add_event("workers lost", {"reason": reason})
                span.end()
        self._spans.clear()

    def recovered(self, lost_at: float) -> None:
        """Adds the time since the loss to the trace of each sequence that has not ended."""
        if self._tracing:
            for seq in self._num_steps:
                if seq.status is not Status.FINISHED:
                    self._num_steps[seq] = min(self._num_steps[seq], 1)
                    self._tracing.add("recovery", seq.request.traceparent, lost_at)
