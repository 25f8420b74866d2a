"""The findings of a campaign."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table

# A process that has grown beyond this has kept something that it should have dropped.
_GROWTH, _GROWTH_MB = 1.5, 100.0


@dataclass
class Rest:
    """A measurement of an idle stack."""

    blocks_used: int
    waiting: int
    running: int
    processes: int
    memory_mb: dict[str, float]  # resident, by process

    def problems_since(self, start: Rest) -> list[str]:
        """Names whatever is not as it was at `start`."""
        problems = [
            f"at rest: {name} is {value}, not 0"
            for name in ("blocks_used", "waiting", "running")
            if (value := getattr(self, name))
        ]
        if self.processes != start.processes:
            problems.append(f"at rest: {self.processes} processes, not {start.processes}")
        for name, now in self.memory_mb.items():
            before = start.memory_mb[name]
            if now > _GROWTH * before + _GROWTH_MB:
                problems.append(f"at rest: {name} has {now:.0f} MB, {before:.0f} at the start")
        return problems


@dataclass
class Report:
    """The figures of a campaign. `pauses_s` holds, per kind of fault, the longest time each open
    stream that precedes all others went without a token, from the fault until the stack had
    recovered."""

    seed: int
    seconds: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    requests: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    lost: int = 0
    duplicated: int = 0
    wrong: int = 0
    failures: list[str] = field(default_factory=list)
    pauses_s: dict[str, list[float]] = field(default_factory=dict)
    rest: list[dict[str, Rest]] = field(default_factory=list)  # per stack: at its start, at its end

    def add(self, other: Report) -> None:
        """Adds the figures of another stack."""
        self.faults += other.faults
        self.requests += other.requests
        for name in ("tokens", "lost", "duplicated", "wrong"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.failures += other.failures
        for kind, pauses in other.pauses_s.items():
            self.pauses_s.setdefault(kind, []).extend(pauses)
        self.rest += other.rest

    @property
    def ok(self) -> bool:
        return not (self.lost or self.duplicated or self.wrong or self.failures)

    def save(self, path: Path) -> None:
        values = vars(self) | {
            "pauses_s": {kind: quantiles(each) for kind, each in self.pauses_s.items()},
            "rest": [{when: vars(rest) for when, rest in each.items()} for each in self.rest],
        }
        path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")

    def render(self) -> RenderableType:
        faults = Table("fault", "times", "streams", "pause p50 s", "p90", "p99", "longest")
        for kind, times in sorted(self.faults.items()):
            pauses = self.pauses_s.get(kind, [])
            figures = [f"{value:.2f}" for value in quantiles(pauses).values()]
            faults.add_row(kind, str(times), str(len(pauses)), *figures)
        totals = Table("", "", show_header=False)
        totals.add_row("seed", str(self.seed))
        totals.add_row("seconds", f"{self.seconds:.0f}")
        totals.add_row("faults", str(self.faults.total()))
        for way, count in sorted(self.requests.items()):
            totals.add_row(f"requests, {way}", str(count))
        for name in ("tokens", "lost", "duplicated", "wrong"):
            totals.add_row(name if name == "tokens" else f"tokens {name}", str(getattr(self, name)))
        for stack in self.rest:
            for name, now in stack["end"].memory_mb.items():
                before = stack["start"].memory_mb[name]
                totals.add_row(f"{name}, MB at rest", f"{before:.0f} -> {now:.0f}")
        totals.add_row("failures", str(len(self.failures)))
        return Group(faults, totals, *self.failures[:20])


def quantiles(pauses: list[float]) -> dict[str, float]:
    """p50, p90, p99 and the longest, in seconds; empty if there are no pauses."""
    if not pauses:
        return {}
    cuts = statistics.quantiles([*pauses, *pauses], n=100, method="inclusive")
    return {"p50": cuts[49], "p90": cuts[89], "p99": cuts[98], "longest": max(pauses)}
