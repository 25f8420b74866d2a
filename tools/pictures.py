"""`python -m tools.pictures`: draws charts in docs/pictures from the results in bench/results."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures"
PEERS = {  # labels of the entries that are drawn, from the top
    "nano-int8-kv8": "nano-vllm-grpc, int8",
    "openvino-int8": "OpenVINO GenAI, int8",
    "llama-q8_0": "llama.cpp, Q8_0",
    "nano-int4": "nano-vllm-grpc, int4",
    "llama-q4_0": "llama.cpp, Q4_0",
    "nano-bf16": "nano-vllm-grpc, bfloat16",
    "vllm-bf16": "vLLM, bfloat16",
    "openvino-fp16": "OpenVINO GenAI, fp16",
}

_OURS, _OTHERS = "tab:blue", "silver"
_OF_PEERS = {
    "output_tokens_per_s": "32 streams, tokens/s",
    "single_stream_tokens_per_s": "one stream, tokens/s",
    "ttft_1024_s": "first token of 1,024, s (less is better)",
}


def main() -> None:
    rcParams["svg.hashsalt"] = "the same ids in each run"
    _draw_peers(_result("2026-11-26-cpu-amd-epyc-peers-qwen3-0.6b"), PICTURES / "peers.svg")
    _draw_load(_result("2026-11-27-cpu-amd-epyc-load-smollm2"), PICTURES / "load.svg")
    _draw_recovery(_result("2026-11-27-cpu-amd-epyc-recovery"), PICTURES / "recovery.svg")


def _result(name: str) -> dict[str, Any]:
    path = ROOT / "bench" / "results" / f"{name}.json"
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return result


def _draw_load(result: Mapping[str, Any], path: Path) -> None:
    """Draws times to first token, gaps between tokens and answered requests over the load. `result`
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
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_xticks(_round_ticks(offered[0], offered[-1]))
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(f"{result['model']}: latency against load, Poisson arrivals")
    figure.savefig(path, dpi=120)


def _round_ticks(low: float, high: float) -> list[float]:
    """Round numbers between `low` and `high`."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [digit * 10.0**decade for decade in decades for digit in (1, 1.5, 2, 3, 5, 7)]
    return [tick for tick in ticks if low <= tick <= high] or [low, high]


def _draw_peers(result: Mapping[str, Any], path: Path) -> None:
    """Draws bars of the servers' medians. `result` is the JSON of `--mode peers`."""
    figure, panels = _figure(3.6)
    entries = {entry["name"]: entry for entry in result["entries"]}
    names = [*PEERS][::-1]
    colors = [_OURS if entries[name]["peer"] == "nano" else _OTHERS for name in names]
    for axes, (figure_name, title) in zip(panels, _OF_PEERS.items(), strict=True):
        values = [entries[name][figure_name]["median"] for name in names]
        bars = axes.barh([PEERS[name] for name in names], values, color=colors)
        axes.bar_label(bars, [f"{value:.3g}" for value in values], padding=3)
        axes.set(title=title, xlim=(0, 1.15 * max(values)), xticks=[])
        axes.spines[["top", "right", "bottom"]].set_visible(False)
    for axes in panels[1:]:
        axes.set_yticks([])
    figure.savefig(path, metadata={"Date": None})


def _draw_recovery(result: Mapping[str, Any], path: Path) -> None:
    """Draws a worker's death on a time line: each stream's tokens, and the spans of the first
    stream's trace. `result` is the JSON of `--mode recovery`."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    streams, spans = result["streams"], result["spans"]
    trace = next(span["trace"] for span in spans if span["name"] == "recovery")
    rows = [f"stream {number}: tokens" for number in range(1, len(streams) + 1)]
    rows += ["scheduler: steps", "worker: steps", "scheduler: recovery"]
    for row, times in enumerate(streams):
        axes.plot([1000 * at for at in times], [row] * len(times), "|", color=_OURS, markersize=12)
    bars = [("scheduler", "step"), ("worker", None), ("scheduler", "recovery")]
    for row, (service, name) in enumerate(bars, len(streams)):
        shown = [
            (1000 * span["start_s"], 1000 * (span["end_s"] - span["start_s"]))
            for span in spans
            if span["trace"] == trace
            and span["service"] == service
            and name in (None, span["name"])
        ]
        axes.broken_barh(
            shown, (row - 0.3, 0.6), color="tab:red" if name == "recovery" else _OTHERS
        )
    axes.axvline(0, color="tab:red", linestyle=":")
    axes.set_yticks(range(len(rows)), rows)
    axes.invert_yaxis()
    axes.set(xlabel="ms after kill -9 of the worker", xlim=(-150, 450))
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})


def _figure(height: float = 4) -> tuple[Figure, Sequence[Axes]]:
    figure = Figure(figsize=(13, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, 3)


if __name__ == "__main__":
    main()
