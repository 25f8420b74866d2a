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
            ("request_queue_time_seconds", "Time in the queue.", self.queue_time),
            ("e2e_request_latency_seconds", "Time to a request's end.", self.latency),
        ):
            yield self._histogram(name, help_text, histogram)
        yield self._recoveries("scheduler", self.recovery)
        help_text = "Engines that serve."
        yield self._gauge("engines_serving", help_text, self.num_engines_serving)
        help_text = "Completions that moved to another engine."
        yield self._counter("moved_completions", help_text, self.moved)
        finished = [([reason], count) for reason, count in dict(self.finished).items()]
        help_text = "Completions that ended, by reason."
        yield self._counters("request_success", help_text, ["finished_reason"], finished)
        yield from self._client_families()

    def _client_families(self) -> Iterator[Metric]:
        usage = self.usage
        requests = [([*key], count) for key, count in dict(usage.requests).items()]
        labels, help_text = ["client", "method", "outcome"], "Calls that ended, by outcome."
        yield self._counters("client_requests", help_text, labels, requests)
        rejections = [([*key], count) for key, count in dict(usage.rejections).items()]
        labels, help_text = ["client", "reason"], "Rejected calls, by field or limit."
        yield self._counters("client_refusals", help_text, labels, rejections)
        for name, help_text in (
            ("prompt_tokens", "Tokens of prompts, of calls that ended."),
            ("cached_prompt_tokens", "Tokens of prompts that were cached, of calls that ended."),
            ("completion_tokens", "Tokens of completions, of calls that ended."),
        ):
            counts = [([client], count) for client, count in dict(getattr(usage, name)).items()]
            yield self._counters(f"client_{name}", help_text, ["client"], counts)
