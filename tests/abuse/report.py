"""The findings of a campaign of attacks."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from tests.abuse.attack import Attack, Gains
from tests.abuse.figures import NOT_SERVING, STUCK, Figures

_REFUSED = "RESOURCE_EXHAUSTED"
_SHOWN = 5  # kinds of answers
_WINDOWS = ("none", "control", "attack")


@dataclass
class Round:
    """An attack, and the windows beside it (`tests.abuse.campaign`). Cores are CPU seconds per
    second."""

    none: Figures
    attack: Figures
    control: Figures
    attackers_cores: float
    extra_cores: float
    died: list[str]  # processes that nobody was to kill; the stack, if it does not serve again
    gains: Gains

    @property
    def broken(self) -> bool:
        """Whether the stack is no longer what it was."""
        return bool(self.attack.harm[STUCK] or self.died)

    @property
    def p99_factor(self) -> float:
        """The growth of honest streams' p99 gap against the control."""
        return self.attack.gap_p99_ms / max(self.control.gap_p99_ms, 1e-3)


@dataclass
class Result:
    """An attack's rounds."""

    attack: Attack
    rounds: list[Round] = field(default_factory=list)

    def median(self, figure: str) -> float:
        """The median of a figure, as in `attack.gap_p99_ms`, over all rounds."""
        return round(statistics.median(map(attrgetter(figure), self.rounds)), 2)

    def summary(self) -> dict[str, Any]:
        """Medians over rounds of p99 gaps, and the worst of all rounds."""
        return {
            "p99_factor": self.median("p99_factor"),
            "gap_p99_ms": {name: self.median(f"{name}.gap_p99_ms") for name in _WINDOWS},
            "worst_health_ms": max(each.attack.health_ms for each in self.rounds),
            "harm": self.harm(),
        }

    def harm(self) -> list[str]:
        """Names what the honest suffered besides slowness. A service that is killed need not
        serve. A client that shares its host's limits, because there are no tokens, may be
        refused."""
        harm: Counter[str] = Counter()
        for each in self.rounds:
            harm += each.attack.harm + Counter(each.died)
        if self.attack.kills:
            del harm[NOT_SERVING]
        if self.attack.anonymous:
            del harm[_REFUSED]
        return [f"{count} × {what}" for what, count in harm.items()]


@dataclass
class Report:
    """The results of a campaign."""

    window_s: float
    rounds: int
    results: list[Result] = field(default_factory=list)
    seconds: float = 0.0  # in all

    def failures(self, factor: float | None) -> list[str]:
        """Names every harm, and, unless it is None, growth of the p99 gap beyond `factor`."""
        failures = []
        for result in self.results:
            if harm := result.harm():
                failures.append(f"{result.attack.name}: {', '.join(harm)}")
            found = result.median("p99_factor")
            if factor is not None and found > factor:
                grown = f"the p99 gap is {found:.1f} times the control's"
                failures.append(f"{result.attack.name}: {grown}")
        return failures

    def save(self, path: Path) -> None:
        attacks = {each.attack.name: each.summary() for each in self.results}
        values = {**vars(self), "results": attacks}
        path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")

    def render(self, factor: float | None) -> RenderableType:
        """A table of summaries, with the medians of the CPU used, and what attackers gained."""
        table = Table(
            *("attack", f"p99 gap ms\n{', '.join(_WINDOWS)}", "factor", "slowest health ms"),
            *("CPU cores\nattacker + extra", "it sent", "it got", "harm"),
        )
        for each in self.results:
            summary = each.summary()
            table.add_row(
                each.attack.name,
                ", ".join(f"{gap:.0f}" for gap in summary["gap_p99_ms"].values()),
                f"{summary['p99_factor']:.2f}",
                f"{summary['worst_health_ms']:.0f}",
                f"{each.median('attackers_cores')} + {each.median('extra_cores')}",
                _most([played.gains.sent for played in each.rounds]),
                _most([played.gains.answers for played in each.rounds]),
                "\n".join(summary["harm"]) or "none",
            )
        failures = self.failures(factor)
        total = f"{len(self.results)} attacks in {self.seconds:.0f} s, {len(failures)} failures"
        return Group(table, total, *failures)


def _most(counts: list[Counter[str]]) -> str:
    """The most frequent kinds, one per line."""
    most = sum(counts, Counter[str]()).most_common(_SHOWN)
    return "\n".join(f"{count:,} {what}" for what, count in most) or "nothing"
