"""Plots a run: its throughput over time and the distributions of its latencies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from bench.metrics import tokens_over_time
from bench.result import Result
from bench.run import Run

_BINS = 60


def write_plot(result: Result, path: Path) -> None:
    """Writes the plot as a PNG."""
    figure = Figure(figsize=(13, 4), layout="constrained")
    FigureCanvasAgg(figure)
    throughput, ttft, itl = figure.subplots(1, 3)
    for run in (result.stack, result.in_process):
        if run:
            _draw(run, throughput, ttft, itl)
    throughput.set(xlabel="time, s", ylabel="output tokens/s", ylim=(0, None))
    ttft.set(xlabel="time to first token, s", ylabel="share of requests", ylim=(0, 1))
    itl.set(xlabel="inter-token latency, s", ylabel="share of tokens", ylim=(0, 1), xscale="log")
    throughput.legend()
    figure.suptitle(f"{result.model}, {result.stack.metrics.requests} requests")
    figure.savefig(path, dpi=120)


def _draw(run: Run, throughput: Axes, ttft: Axes, itl: Axes) -> None:
    throughput.step(*tokens_over_time(run.traces, _BINS), where="mid", label=run.name)
    _draw_distribution(ttft, [trace.ttft_s for trace in run.traces], run.name)
    latencies = [value for trace in run.traces for value in trace.inter_token_latencies_s()]
    _draw_distribution(itl, latencies, run.name)


def _draw_distribution(axes: Axes, values: Sequence[float], label: str) -> None:
    if values:
        axes.step(np.sort(values), np.arange(1, len(values) + 1) / len(values), label=label)
