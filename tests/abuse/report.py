"""The findings of a campaign of attacks."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table

from tests.abuse.attack import Gains
from tests.abuse.figures import Figures

_REFUSED = "RESOURCE_EXHAUSTED"
_SHOWN = 5  # kinds of answers


@dataclass
class Round:
    """An attack, and the windows beside it (`tests.abuse.campaign`). Cores are CPU seconds per
    second; memory is in MB, by program, in proportional set sizes."""

    none: Figures
    attack: Figures
    control: Figures
    attackers_cores: float
    extra_cores: float
    memory_before_mb: dict[str, float]
    memory_peak_mb: dict[str, float]
    memory_after_mb: dict[str, float]
    died: list[str]  # processes that nobody was to kill; the stack, if it does not serve again
    gains: Gains

    @property
    def broken(self) -> bool:
        """Whether the stack is no longer what it was."""
        return bool(self.attack.stuck or self.died)

    @property
    def p99_factor(self) -> float:
        """The growth of honest streams' p99 gap against the control."""
        return self.attack.gap_p99_ms / max(self.control.gap_p99_ms, 1e-3)


@dataclass
class Result:
    """An attack's rounds."""

    name: str
    about: str
    kills: bool
    anonymous: bool  # the stack asked for no tokens
    rounds: list[Round] = field(default_factory=list)

    def median(self, figure: Callable[[Round], float]) -> float:
        return statistics.median(map(figure, self.rounds))

    @property
    def p99_factor(self) -> float:
        return self.median(lambda each: each.p99_factor)

    def harm(self) -> list[str]:
        """Names what the honest suffered besides slowness. A client that shares its host's limits,
        because there are no tokens, may be refused."""
        harm: Counter[str] = Counter()
        for each in self.rounds:
            harm += each.attack.harm() + Counter(each.died)
            if not self.kills:
                harm["not serving"] += each.attack.not_serving
        if self.anonymous:
            del harm[_REFUSED]
        return [f"{count} × {what}" for what, count in harm.items() if count]


@dataclass
class Report:
    """The results of a campaign; times in its figures are in milliseconds."""

    seconds: float  # of a window
    rounds: int
    results: list[Result] = field(default_factory=list)
    seconds_in_all: float = 0.0

    def failures(self, factor: float | None) -> list[str]:
        """Names every harm, and, unless it is None, growth of the p99 gap beyond `factor`."""
        failures = []
        for result in self.results:
            harm = result.harm()
            if harm:
                failures.append(f"{result.name}: {', '.join(harm)}")
            if factor is not None and result.p99_factor > factor:
                failures.append(
                    f"{result.name}: the p99 gap is {result.p99_factor:.1f} times the control's"
                )
        return failures

    def save(self, path: Path) -> None:
        results = [
            {**vars(each), "p99_factor": each.p99_factor, "harm": each.harm()}
            for each in self.results
        ]
        values = {**vars(self), "results": results}
        # Not asdict, which counts a Counter's items.
        path.write_text(json.dumps(values, indent=1, default=vars) + "\n", encoding="utf-8")

    def render(self, factor: float | None) -> RenderableType:
        """A table: medians over rounds of p99 gaps and CPU, else the worst of all rounds."""
        table = Table(*_COLUMNS, "harm")
        for each in self.results:
            harm = each.harm()
            figures = [column(each) for column in _COLUMNS.values()]
            table.add_row(*figures, "\n".join(harm) or "none")
        failures = self.failures(factor)
        total = (
            f"{len(self.results)} attacks in {self.seconds_in_all:.0f} s, {len(failures)} failures"
        )
        return Group(table, total, *failures)


# Each with its figures, as text.
_COLUMNS: dict[str, Callable[[Result], str]] = {
    "attack": lambda result: result.name,
    "p99 gap ms\nnone, control, attack": lambda result: _figures(
        result.median(lambda each: each.none.gap_p99_ms),
        result.median(lambda each: each.control.gap_p99_ms),
        result.median(lambda each: each.attack.gap_p99_ms),
    ),
    "factor": lambda result: f"{result.p99_factor:.2f}",
    "worst gap ms\nnone, attack": lambda result: _worst(result, lambda w: w.gap_worst_ms),
    "first token ms\nnone, attack\n(with a schema)": lambda result: (
        f"{_worst(result, lambda w: w.first_worst_ms)}\n"
        f"({_worst(result, lambda w: w.structured_worst_ms)})"
    ),
    "health ms, at worst\nfrontend, scheduler, new\n(control)": lambda result: (
        f"{_health([each.attack for each in result.rounds])}\n"
        f"({_health([each.control for each in result.rounds])})"
    ),
    "CPU cores\nattacker + extra": lambda result: (
        f"{result.median(lambda each: each.attackers_cores):.2f} + "
        f"{result.median(lambda each: each.extra_cores):.2f}"
    ),
    "MB before, peak, after": lambda result: _memory(result.rounds),
    "it sent": lambda result: _gains(result.rounds, "sent"),
    "it got": lambda result: _gains(result.rounds, "answers"),
}


def _worst(result: Result, figure: Callable[[Figures], float]) -> str:
    """The worst of all rounds, undisturbed and under attack."""
    rounds = result.rounds
    return _figures(
        max(figure(each.none) for each in rounds), max(figure(each.attack) for each in rounds)
    )


def _health(windows: list[Figures]) -> str:
    services = ("frontend", "scheduler")
    slowest = [max(w.health_ms.get(service, 0.0) for w in windows) for service in services]
    return _figures(*slowest, max(w.connect_ms for w in windows))


def _memory(rounds: list[Round]) -> str:
    before, after = rounds[0].memory_before_mb, rounds[-1].memory_after_mb
    names = sorted({name for each in rounds for name in each.memory_peak_mb} | before.keys())
    lines = []
    for name in names:
        peak = max(each.memory_peak_mb.get(name, 0.0) for each in rounds)
        if not name.startswith("deploy") or name == "deploy.gateway":
            lines.append(f"{name} {_figures(before.get(name, 0.0), peak, after.get(name, 0.0))}")
    return "\n".join(lines)


def _gains(rounds: list[Round], kind: str) -> str:
    counts: Counter[str] = Counter()
    for each in rounds:
        counts.update(getattr(each.gains, kind))
        if kind == "answers":
            counts["tokens"] += each.gains.tokens
    shown = [f"{count:,} {what}" for what, count in (+counts).most_common(_SHOWN)]
    return "\n".join(shown) or "nothing"


def _figures(*values: float) -> str:
    return ", ".join(f"{value:.0f}" for value in values)
