"""The results of a benchmark run, as JSON and as a table."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.machine import Machine
from bench.run import Run
from bench.single_stream import SingleStream
from bench.workload import TEMPERATURE, Shape


@dataclass(frozen=True)
class Result:
    model: str
    address: str
    shape: Shape
    machine: Machine
    stack: Run
    in_process: Run | None = None
    single: SingleStream | None = None

    @property
    def split_ratio(self) -> float | None:
        """The stack's output tokens/s, divided by those of the same code in one process."""
        if self.in_process is None:
            return None
        return self.stack.metrics.output_tokens_per_s / self.in_process.metrics.output_tokens_per_s

    def to_json(self) -> dict[str, Any]:
        single = self.single or SingleStream(None, None)
        return {
            "mode": "stack",
            "model": self.model,
            "address": self.address,
            **_figures(self.stack),
            "split_ratio": self.split_ratio,
            "in_process": _figures(self.in_process) if self.in_process else None,
            **dataclasses.asdict(single),
            "workload": {**dataclasses.asdict(self.shape), "temperature": TEMPERATURE},
            **dataclasses.asdict(self.machine),
        }


def write_json(result: Result, path: Path) -> None:
    path.write_text(json.dumps(result.to_json(), indent=2) + "\n", encoding="utf-8")


def print_table(result: Result, console: Console) -> None:
    runs = [run for run in (result.stack, result.in_process) if run]
    table = Table(title=f"{result.model}: {result.stack.metrics.requests} requests")
    table.add_column("")
    for run in runs:
        table.add_column(run.name, justify="right")
    for label, key, pattern in _ROWS:
        values = [_figures(run)[key] for run in runs]
        table.add_row(label, *("n/a" if v is None else pattern.format(v) for v in values))
    console.print(table)
    if result.split_ratio is not None:
        console.print(f"split ratio (stack / in process): {result.split_ratio:.3f}")
    if result.single:
        console.print(
            f"one stream: {result.single.single_stream_tokens_per_s:.1f} tokens/s, "
            f"first token of a 1,024-token prompt: {result.single.ttft_1024_s:.3f} s"
        )
    if result.stack.stats and result.stack.stats.cached_prompt_tokens:
        console.print("some prompts were in the prefix cache: the server has seen them before")


_ROWS = (
    ("output tokens/s", "output_tokens_per_s", "{:,.1f}"),
    ("total tokens/s", "total_tokens_per_s", "{:,.1f}"),
    ("time to first token p50, s", "ttft_p50_s", "{:.3f}"),
    ("time to first token p99, s", "ttft_p99_s", "{:.3f}"),
    ("inter-token latency p50, s", "itl_p50_s", "{:.4f}"),
    ("inter-token latency p99, s", "itl_p99_s", "{:.4f}"),
    ("duration, s", "duration_s", "{:.2f}"),
    ("prompt tokens", "prompt_tokens", "{:,}"),
    ("output tokens", "output_tokens", "{:,}"),
    ("steps", "steps", "{:,}"),
    ("mean batch, sequences", "mean_batch", "{:.1f}"),
    ("mean tokens per step", "mean_step_tokens", "{:.1f}"),
    ("prefix-cache hits, prompt tokens", "cached_prompt_tokens", "{:,}"),
    ("preemptions", "preemptions", "{:,}"),
)


def _figures(run: Run) -> dict[str, Any]:
    stats = run.stats
    return {
        **dataclasses.asdict(run.metrics),
        "steps": stats and stats.steps,
        "mean_batch": stats and stats.mean_batch,
        "mean_step_tokens": stats and stats.mean_step_tokens,
        "cached_prompt_tokens": stats and stats.cached_prompt_tokens,
        "preemptions": stats and stats.preemptions,
    }
