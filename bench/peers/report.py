"""The results of a comparison, as JSON and as a table."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.machine import Machine, this_machine
from bench.peers.entries import Entry, Sizes
from bench.report import print_table
from bench.workload import TEMPERATURE

# By name in `driver.Figures`.
_COLUMNS = {
    "output_tokens_per_s": ("tokens/s", "{:.1f}"),
    "cores_busy": ("cores", "{:.2f}"),
    "single_stream_tokens_per_s": ("one stream", "{:.1f}"),
    "ttft_1024_s": ("first of 1024", "{:.2f}"),
    "start_s": ("start, s", "{:.1f}"),
}


@dataclass(frozen=True)
class Round:
    """An entry's result in a round: the output of its driver, or the reason for its failure."""

    answer: dict[str, Any] | None
    error: str | None = None


@dataclass
class Comparison:
    model: str
    entries: Sequence[Entry]
    sizes: Sizes
    num_rounds: int
    rounds: dict[Entry, list[Round]] = field(init=False)
    machine: Machine = field(default_factory=this_machine)

    def __post_init__(self) -> None:
        self.rounds = {entry: [] for entry in self.entries}

    @property
    def failed(self) -> bool:
        return any(each.error for rounds in self.rounds.values() for each in rounds)

    def figures(self, entry: Entry) -> dict[str, dict[str, float]]:
        """Each figure's median, minimum and maximum over the rounds that did not fail; empty if all
        failed."""
        found = [each.answer["figures"] for each in self.rounds[entry] if each.answer]
        values = {name: [each[name] for each in found] for name in _COLUMNS if found}
        return {
            name: {"median": statistics.median(v), "min": min(v), "max": max(v)}
            for name, v in values.items()
        }

    def write(self, path: Path) -> None:
        content = {
            "mode": "peers",
            "model": self.model,
            "workload": {**asdict(self.sizes), "temperature": TEMPERATURE},
            "entries": [
                {
                    **asdict(entry),
                    **self.figures(entry),
                    "rounds": [asdict(each) for each in self.rounds[entry]],
                }
                for entry in self.entries
            ],
            **asdict(self.machine),
        }
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    def print(self, console: Console) -> None:
        rows = []
        for entry in self.entries:
            found = self.figures(entry)
            cells = [show(found[name], pattern) for name, (_, pattern) in _COLUMNS.items() if found]
            rows.append([entry.name, entry.cache, *(cells or ["failed"])])
        title = f"{self.model}: medians of {self.num_rounds} (min–max)"
        columns = ["", "cache", *(label for label, _ in _COLUMNS.values())]
        print_table(console, title, columns, rows)


def show(figure: dict[str, float], pattern: str) -> str:
    median, low, high = (pattern.format(figure[name]) for name in ("median", "min", "max"))
    return median if low == high else f"{median}\n({low}–{high})"
