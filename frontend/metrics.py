"""Metrics of requests, for Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.metrics_core import Metric

from frontend.callers.audit import Usage
from shared.telemetry.metrics import RECOVERY_SECONDS, Histogram, ServiceMetrics

# vLLM's buckets.
_FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKEN_SECONDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
_REQUEST_SECONDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0),
    *(240.0, 480.0, 960.0, 1920.0, 7680.0),
)
# vLLM's finish reasons.
STOP, LENGTH, ABORT, ERROR = "stop", "length", "abort", "error"


class RequestMetrics(ServiceMetrics):
    """Times and ends of requests, and each client's usage."""

    def __init__(self, model: str = "") -> None:
        super().__init__(model)
        self.usage = Usage()
        self.finished = Counter(dict.fromkeys((STOP, LENGTH, ABORT, ERROR), 0))
        self.time_to_first_token = Histogram(_FIRST_TOKEN_SECONDS)
        self.inter_token_latency = Histogram(_TOKEN_SECONDS)
        self.queue_time = Histogram(_REQUEST_SECONDS)
        self.latency = Histogram(_REQUEST_SECONDS)
        self.recovery = Histogram(RECOVERY_SECONDS)
        self.num_engines_serving = 0
        self.moved = 0  # completions, from one engine to another

    def families(self) -> Iterator[Metric]:
        for name, help_text, histogram in (
            ("time_to_first_token_seconds", "Time to first token.", self.time_to_first_token),
            ("inter_token_latency_seconds", "Time between tokens.", self.inter_token_latency),
            ("request_queue_time_seconds", "Time that a request waited.", self.queue_time),
            ("e2e_request_latency_seconds", "Time of a whole request.", self.latency),
        ):
            yield self._histogram(name, help_text, histogram)
        yield self._recoveries("scheduler", self.recovery)
        help_text = "Engines that take requests."
        yield self._gauge("engines_serving", help_text, self.num_engines_serving)
        help_text = "Completions that went on at another engine."
        yield self._counter("moved_completions", help_text, self.moved)
        finished = [([reason], count) for reason, count in dict(self.finished).items()]
        help_text = "Completions that ended, by reason."
        yield self._counters("request_success", help_text, ["finished_reason"], finished)
        yield from self._client_families()

    def _client_families(self) -> Iterator[Metric]:
        clients = list(dict(self.usage.clients).items())
        requests = [
            ([name, *kind], count)
            for name, client in clients
            for kind, count in dict(client.requests).items()
        ]
        labels, help_text = ["client", "method", "outcome"], "Calls that ended, by how they did."
        yield self._counters("client_requests", help_text, labels, requests)
        refusals = [
            ([name, reason], count)
            for name, client in clients
            for reason, count in dict(client.refusals).items()
        ]
        labels, help_text = ["client", "reason"], "Calls refused, by field or limit."
        yield self._counters("client_refusals", help_text, labels, refusals)
        for name in ("prompt_tokens", "cached_prompt_tokens", "completion_tokens"):
            counts = [([client], getattr(usage, name)) for client, usage in clients]
            yield self._counters(f"client_{name}", "Of calls that ended.", ["client"], counts)
