"""Plots latency against load: times to first token, latencies between tokens, requests answered."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


def write_plot(result: Mapping[str, Any], path: Path) -> None:
    """Writes the plot of a run, as its JSON file has it, as a PNG."""
    figure = Figure(figsize=(13, 4), layout="constrained")
    FigureCanvasAgg(figure)
    ttft, itl, rates = figure.subplots(1, 3)
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
