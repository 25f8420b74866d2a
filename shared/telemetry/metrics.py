"""The metrics of a process, in the form that Prometheus reads.

Metrics that vLLM also has use its names, buckets and label `model_name`, behind another prefix. A
dashboard for vLLM needs only the prefix replaced.
"""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from itertools import accumulate
from pathlib import Path

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

_PREFIX = "nanovllm:"
_MODEL = "model_name"

# A step takes a tenth of a millisecond or more, and many seconds for a long prompt on a CPU.
STEP_SECONDS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
# A recovery takes as long as the model takes to load.
RECOVERY_SECONDS = (
    *(0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0),
    *(300.0, 600.0),
)


class Histogram:
    """Counts values by bucket, without a lock. One thread may call `observe` while others read.
    prometheus_client's histogram has locks and takes several times as long."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Seq[float]) -> None:
        """`bounds`: the maximum of each bucket, ascending; one more bucket has larger values."""
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


class ServiceMetrics(Collector):
    """The metrics of a service, made before the process forks, so that each fork starts at zero.

    Another thread calls `collect`, so a service's counters must be safe to read from that thread.
    """

    def __init__(self, model: str = "") -> None:
        """`model`: the model's directory; the directory's name is the label's value."""
        self._model_name = Path(model).resolve().name
        self.restarts = 0

    def collect(self) -> Iterator[Metric]:
        yield self._counter("restarts", "Earlier forks of this process that died.", self.restarts)
        yield from self.families()

    @abstractmethod
    def families(self) -> Iterator[Metric]:
        """The service's own metrics, as they are now."""

    def _recoveries(self, lost: str, histogram: Histogram) -> Metric:
        help_text = "Time from the loss of a process until requests continued."
        return self._histogram("recovery_seconds", help_text, histogram, lost=lost)

    def _gauge(self, name: str, help_text: str, value: float) -> Metric:
        family = GaugeMetricFamily(_PREFIX + name, help_text, labels=[_MODEL])
        family.add_metric([self._model_name], value)
        return family

    def _counter(self, name: str, help_text: str, value: float) -> Metric:
        return self._counters(name, help_text, (), [((), value)])

    def _counters(
        self,
        name: str,
        help_text: str,
        labels: Seq[str],
        values: Iterable[tuple[Seq[str], float]],
    ) -> Metric:
        """A counter with `labels`; `values` pairs the labels' values with a number."""
        family = CounterMetricFamily(_PREFIX + name, help_text, labels=[_MODEL, *labels])
        for label_values, value in values:
            family.add_metric([self._model_name, *label_values], value)
        return family

    def _histogram(self, name: str, help_text: str, histogram: Histogram, **labels: str) -> Metric:
        family = HistogramMetricFamily(_PREFIX + name, help_text, labels=[_MODEL, *labels])
        bounds = (*map(floatToGoString, histogram.bounds), "+Inf")
        buckets = [*zip(bounds, accumulate(histogram.counts.copy()), strict=True)]
        family.add_metric([self._model_name, *labels.values()], buckets, histogram.sum)
        return family
