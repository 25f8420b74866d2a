"""One way of running the workload, and what it took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.engine_stats import EngineStats
from bench.metrics import Metrics, Trace


@dataclass(frozen=True)
class Run:
    """The requests as their clients saw them, and the engine."""

    name: str
    traces: Sequence[Trace]
    metrics: Metrics
    stats: EngineStats | None  # None: the scheduler could not be asked
