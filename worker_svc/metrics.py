"""Prometheus metrics of a rank."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import Metric

from shared.telemetry.metrics import STEP_SECONDS, Histogram, ServiceMetrics


class WorkerMetrics(ServiceMetrics):
    """Measures the time of steps on the device, which shows a rank that is slower than others."""

    def __init__(self, model: str = "") -> None:
        super().__init__(model)
        self.execution = Histogram(STEP_SECONDS)
        self.stage_wait_s = 0.0

    def families(self) -> Iterator[Metric]:
        help_text = "Time of a step on this rank's device."
        yield self._histogram("step_execution_seconds", help_text, self.execution)
        help_text = "Of that, seconds that this rank waited for other pipeline stages, on a CPU."
        yield self._counter("stage_wait_seconds", help_text, self.stage_wait_s)
