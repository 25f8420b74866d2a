"""Turns the arrival times of tokens into the figures of the report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

import numpy as np


@dataclass
class Trace:
    """The times of a request at its client, in seconds of one monotonic clock."""

    prompt_tokens: int
    sent: float
    arrivals: list[tuple[float, int]] = field(default_factory=list)  # time, tokens of the chunk

    @property
    def output_tokens(self) -> int:
        return sum(tokens for _, tokens in self.arrivals)

    @property
    def ttft_s(self) -> float:
        """Seconds from sending the request to its first token."""
        return self.arrivals[0][0] - self.sent

    @property
    def tokens_per_s(self) -> float:
        """The rate of the tokens after the first chunk."""
        (first, at_first), (last, _) = self.arrivals[0], self.arrivals[-1]
        return (self.output_tokens - at_first) / (last - first)

    def inter_token_latencies_s(self) -> list[float]:
        """One latency per token after the first chunk. If a chunk of k tokens came g seconds after
        the previous chunk, it counts as k latencies of g/k."""
        latencies: list[float] = []
        for (before, _), (now, tokens) in zip(self.arrivals, self.arrivals[1:], strict=False):
            latencies += [(now - before) / tokens] * tokens
        return latencies


def pause_s(stream: Trace, killed: float) -> float | None:
    """The longest gap between two chunks that ends after the kill, less two ordinary steps of the
    stream, in seconds. An ordinary step is the median gap before the kill.

    Args:
        killed: the time of the kill, by the clock of the arrivals.

    Returns:
        None if there are no such gaps.
    """
    gaps = [(end - start, end > killed) for (start, _), (end, _) in pairwise(stream.arrivals)]
    before = [gap for gap, is_after in gaps if not is_after]
    after = [gap for gap, is_after in gaps if is_after]
    return max(max(after) - 2 * median(before), 0.0) if before and after else None


@dataclass(frozen=True)
class Metrics:
    """A run's figures. Percentiles interpolate linearly and are None if nothing was measured."""

    requests: int
    prompt_tokens: int
    output_tokens: int
    duration_s: float  # from the first request sent to the last token
    output_tokens_per_s: float
    total_tokens_per_s: float  # prompts included
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    itl_p50_s: float | None
    itl_p99_s: float | None


def summarize(traces: Sequence[Trace]) -> Metrics:
    """Computes a run's metrics. Every trace must have ended with at least one token."""
    start = min(trace.sent for trace in traces)
    duration = max(trace.arrivals[-1][0] for trace in traces) - start
    prompt_tokens = sum(trace.prompt_tokens for trace in traces)
    output_tokens = sum(trace.output_tokens for trace in traces)
    ttfts = [trace.ttft_s for trace in traces]
    latencies = [latency for trace in traces for latency in trace.inter_token_latencies_s()]
    return Metrics(
        requests=len(traces),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        duration_s=duration,
        output_tokens_per_s=output_tokens / duration,
        total_tokens_per_s=(prompt_tokens + output_tokens) / duration,
        ttft_p50_s=percentile(ttfts, 50),
        ttft_p99_s=percentile(ttfts, 99),
        itl_p50_s=percentile(latencies, 50),
        itl_p99_s=percentile(latencies, 99),
    )


def percentile(values: Sequence[float], q: float) -> float | None:
    return float(np.percentile(values, q)) if values else None
