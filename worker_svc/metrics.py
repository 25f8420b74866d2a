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

    def families(self) -> Iterator[Metric]:
        help_text = "Time of a step on this rank's device."
        yield self._histogram("step_execution_seconds", help_text, self.execution)
