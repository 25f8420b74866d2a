"""The results of a comparison, as JSON and as a table."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.machine import Machine, this_machine
from bench.peers.calibration import Calibration
from bench.peers.driver import Figures
from bench.peers.entries import Entry, Sizes
from bench.workload import TEMPERATURE


@dataclass(frozen=True)
class Answer:
    """A driver's, from a server that it has started and stopped."""

    figures: Figures
    versions: dict[str, str]
    settings: dict[str, Any]

    @classmethod
    def from_json(cls, text: str) -> Answer:
        values = json.loads(text)
        return cls(Figures(**values["figures"]), values["versions"], values["settings"])


@dataclass(frozen=True)
class Round:
    """One entry's turn, with the machine's speed just before and just after."""

    before: Calibration
    after: Calibration
    answer: Answer | None
    error: str | None  # instead of an answer


@dataclass(frozen=True)
class Range:
    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Range:
        return cls(statistics.median(values), min(values), max(values))

    def show(self, pattern: str, separator: str = " ") -> str:
        if self.min == self.max:
            return pattern.format(self.median)
        low, high = pattern.format(self.min), pattern.format(self.max)
        return f"{pattern.format(self.median)}{separator}({low}–{high})"


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

    def ranges(self, entry: Entry) -> dict[str, Range]:
        """Each figure over the rounds that did not fail; empty if there is none."""
        found = [each.answer.figures for each in self.rounds[entry] if each.answer]
        if not found:
            return {}
        names = [each.name for each in fields(Figures)]
        return {name: Range.of([getattr(each, name) for each in found]) for name in names}

    def speeds(self) -> dict[str, Range]:
        """The machine's, over the whole run; empty before the first round."""
        rounds = [each for rounds in self.rounds.values() for each in rounds]
        found = [asdict(speed) for each in rounds for speed in (each.before, each.after)]
        return {name: Range.of([each[name] for each in found]) for name in (found or [{}])[0]}

    def to_json(self) -> dict[str, Any]:
        return {
            "mode": "peers",
            "model": self.model,
            "workload": {**asdict(self.sizes), "temperature": TEMPERATURE},
            "entries": [
                {
                    **asdict(entry),
                    **{name: asdict(found) for name, found in self.ranges(entry).items()},
                    "rounds": [asdict(each) for each in self.rounds[entry]],
                }
                for entry in self.entries
            ],
            "speeds": {name: asdict(speed) for name, speed in self.speeds().items()},
            **asdict(self.machine),
        }

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(self.to_json(), indent=2) + "\n", encoding="utf-8")

    def print(self, console: Console) -> None:
        title = f"{self.model}: medians of {self.num_rounds} (min–max)"
        table = Table(title=title, box=None, pad_edge=False)
        table.add_column("", no_wrap=True)
        table.add_column("cache", no_wrap=True)
        for label, _, _ in _COLUMNS:
            table.add_column(label, justify="right", no_wrap=True)
        for entry in self.entries:
            found = self.ranges(entry)
            cells = [found[name].show(pattern, "\n") for _, name, pattern in _COLUMNS if found]
            table.add_row(entry.name, entry.cache, *(cells or ["failed"]))
        console.print(table)
        speeds = (f"{name} {speed.show('{:.0f}')}" for name, speed in self.speeds().items())
        console.print(f"the machine meanwhile: {', '.join(speeds)}")


_COLUMNS = (
    ("tokens/s", "output_tokens_per_s", "{:.1f}"),
    ("cores", "cores_busy", "{:.2f}"),
    ("one stream", "single_stream_tokens_per_s", "{:.1f}"),
    ("first of 1024", "ttft_1024_s", "{:.2f}"),
    ("start, s", "start_s", "{:.1f}"),
)
