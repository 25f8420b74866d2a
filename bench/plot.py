"""Plots of a run and of latency against load, as PNG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from bench.metrics import tokens_over_time
from bench.stack import Run

_BINS = 60


def write_plot(title: str, runs: Sequence[Run], path: Path) -> None:
    """Plots throughput over time and the distributions of latencies."""
    figure, (throughput, ttft, itl) = _figure()
    for run in runs:
        throughput.step(*tokens_over_time(run.traces, _BINS), where="mid", label=run.name)
        _draw_distribution(ttft, [trace.ttft_s for trace in run.traces], run.name)
        latencies = [value for trace in run.traces for value in trace.inter_token_latencies_s()]
        _draw_distribution(itl, latencies, run.name)
    throughput.set(xlabel="time, s", ylabel="output tokens/s", ylim=(0, None))
    ttft.set(xlabel="time to first token, s", ylabel="share of requests", ylim=(0, 1))
    itl.set(xlabel="inter-token latency, s", ylabel="share of tokens", ylim=(0, 1), xscale="log")
    throughput.legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


def write_load_plot(result: Mapping[str, Any], path: Path) -> None:
    """Plots times to first token, gaps between tokens and answered requests over the load. `result`
    is the JSON of a run."""
    figure, (ttft, itl, rates) = _figure()
    loads = result["loads"]
    offered = [load["offered_rate"] for load in loads]
    for axes, name, title in (
        (ttft, "ttft", "time to first token, s"),
        (itl, "itl", "inter-token latency, s"),
    ):
        for percentile in ("p50", "p99"):
            values = [load[f"{name}_{percentile}_s"] for load in loads]
            axes.plot(offered, values, marker="o", markersize=4, label=percentile)
        axes.axhline(result["goals"][f"{name}_s"], color="grey", linestyle=":", label="goal")
        axes.set(ylabel=title, yscale="log")
    rates.plot(offered, offered, color="grey", linestyle=":", label="offered")
    for name, label in (("achieved_rate", "achieved"), ("goodput", "within both goals")):
        rates.plot(offered, [load[name] for load in loads], marker="o", markersize=4, label=label)
    rates.set(ylabel="requests/s", ylim=(0, None))
    for axes in (ttft, itl, rates):
        axes.set(xlabel="offered load, requests/s", xscale="log")
        axes.set_xticks(offered, [f"{rate:.3g}" for rate in offered], rotation=45)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(f"{result['model']}: latency against load, Poisson arrivals")
    figure.savefig(path, dpi=120)


def _figure() -> tuple[Figure, Sequence[Axes]]:
    figure = Figure(figsize=(13, 4), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, 3)


def _draw_distribution(axes: Axes, values: Sequence[float], label: str) -> None:
    if values:
        axes.step(np.sort(values), np.arange(1, len(values) + 1) / len(values), label=label)
