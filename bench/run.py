"""One way of running the workload, and its results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.engine_stats import EngineStats
from bench.metrics import Metrics, Trace


@dataclass(frozen=True)
class Run:
    """A run as seen by the clients of its requests, and by the engine."""

    name: str
    traces: Sequence[Trace]
    metrics: Metrics
    stats: EngineStats | None  # None: the scheduler could not be asked
