from __future__ import annotations

import pytest

from bench.metrics import Trace, percentile, summarize, tokens_over_time


def test_percentiles_interpolate() -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
    assert percentile([float(i) for i in range(101)], 99) == 99.0
    assert percentile([10.0, 20.0], 99) == pytest.approx(19.9)
    assert percentile([7.0], 99) == 7.0
    assert percentile([], 50) is None


def test_a_chunk_of_k_tokens_counts_as_k_gaps_of_a_kth() -> None:
    trace = Trace(5, sent=1.0, arrivals=[(1.5, 1), (1.7, 1), (2.3, 3)])
    assert trace.ttft_s == 0.5
    assert trace.inter_token_latencies_s() == pytest.approx([0.2, 0.2, 0.2, 0.2])
    assert trace.output_tokens == 5


def test_summary_of_two_requests() -> None:
    traces = [
        Trace(10, sent=0.0, arrivals=[(1.0, 1), (2.0, 1), (5.0, 1)]),
        Trace(30, sent=1.0, arrivals=[(4.0, 1)]),
    ]
    metrics = summarize(traces)
    assert (metrics.requests, metrics.prompt_tokens, metrics.output_tokens) == (2, 40, 4)
    assert metrics.duration_s == 5.0
    assert metrics.output_tokens_per_s == pytest.approx(4 / 5)
    assert metrics.total_tokens_per_s == pytest.approx(44 / 5)
    assert (metrics.ttft_p50_s, metrics.itl_p50_s) == (2.0, 2.0)
    assert metrics.itl_p99_s == pytest.approx(1 + 0.99 * 2)


def test_one_token_each_has_no_inter_token_latency() -> None:
    assert summarize([Trace(1, 0.0, [(1.0, 1)])]).itl_p99_s is None


def test_tokens_over_time() -> None:
    traces = [Trace(1, 0.0, [(0.5, 1), (3.5, 4)]), Trace(1, 0.0, [(1.5, 2), (4.0, 1)])]
    times, rates = tokens_over_time(traces, 4)
    assert times == [0.5, 1.5, 2.5, 3.5]
    assert rates == [1.0, 2.0, 0.0, 5.0]
