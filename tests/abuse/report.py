"""The findings of a campaign of attacks."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from tests.abuse.figures import Figures

_REFUSED = "RESOURCE_EXHAUSTED"
_SHOWN = 4  # kinds of answers
_SERVICES = ("frontend", "scheduler_svc")


@dataclass
class Round:
    """An attack, and the windows beside it (`tests.abuse.campaign`). Cores are CPU seconds per
    second; memory is in MB, by program, in proportional set sizes."""

    none: Figures
    attack: Figures
    control: Figures
    control_alone: Figures | None  # None: as `control`, the stack had no extra work
    attackers_cores: float
    extra_cores: float
    memory_before_mb: dict[str, float]
    memory_peak_mb: dict[str, float]
    memory_after_mb: dict[str, float]
    died: list[str]  # processes that nobody was to kill
    loot: dict[str, Any]

    @property
    def p99_factor(self) -> float:
        """The growth of honest streams' p99 gap against the control."""
        return self.attack.gap_p99_ms / max(self.control.gap_p99_ms, 1e-3)

    @property
    def p99_factor_alone(self) -> float:
        """The same against the control without the stack's own extra work."""
        control = self.control_alone or self.control
        return self.attack.gap_p99_ms / max(control.gap_p99_ms, 1e-3)


@dataclass
class Result:
    """An attack's rounds."""

    name: str
    about: str
    kills: bool
    rounds: list[Round] = field(default_factory=list)

    def median(self, figure: Callable[[Round], float]) -> float:
        return statistics.median(map(figure, self.rounds))

    @property
    def p99_factor(self) -> float:
        return self.median(lambda each: each.p99_factor)

    def harm(self, *, anonymous: bool) -> list[str]:
        """Names what the honest suffered besides slowness. A client that shares its host's limits,
        because there are no tokens, may be refused."""
        harm: Counter[str] = Counter()
        for each in self.rounds:
            errors = dict(each.attack.errors)
            if anonymous:
                errors.pop(_REFUSED, None)
            harm.update(errors)
            for name in ("wrong", "stuck", "lies", "no_connection"):
                harm[name.replace("_", " ")] += getattr(each.attack, name)
            if not self.kills:
                harm["not serving"] += each.attack.not_serving
            harm.update(each.died)
        return [f"{count} × {what}" for what, count in harm.items() if count]


@dataclass
class Report:
    """The results of a campaign; times in its figures are in milliseconds."""

    seconds: float  # of a window
    rounds: int
    anonymous: bool
    results: list[Result] = field(default_factory=list)
    seconds_in_all: float = 0.0

    def failures(self, factor: float | None) -> list[str]:
        """Names every harm, and, unless it is None, growth of the p99 gap beyond `factor`."""
        failures = []
        for result in self.results:
            harm = result.harm(anonymous=self.anonymous)
            if harm:
                failures.append(f"{result.name}: {', '.join(harm)}")
            if factor is not None and result.p99_factor > factor:
                failures.append(
                    f"{result.name}: the p99 gap is {result.p99_factor:.1f} times the control's"
                )
        return failures

    def save(self, path: Path) -> None:
        values = asdict(self)
        for result, each in zip(values["results"], self.results, strict=True):
            result["p99_factor"] = each.p99_factor
            result["p99_factor_alone"] = each.median(lambda r: r.p99_factor_alone)
            result["harm"] = each.harm(anonymous=self.anonymous)
        path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")

    def render(self, factor: float | None) -> RenderableType:
        """A table of medians over rounds, except for worst gaps, stalls and peaks."""
        table = Table(
            "attack",
            "p99 gap ms\nnone, control, attack",
            "factor\n(alone)",
            "worst gap ms\nnone, attack",
            "first token ms\nnone, attack",
            "health ms, at worst\nfrontend, scheduler, new",
            "CPU cores\nattacker + extra",
            "MB before, peak, after\nfrontend / scheduler",
            "it sent",
            "it got",
            "harm",
        )
        for each in self.results:
            table.add_row(*_row(each, anonymous=self.anonymous))
        failures = self.failures(factor)
        total = (
            f"{len(self.results)} attacks in {self.seconds_in_all:.0f} s, {len(failures)} failures"
        )
        return Group(table, total, *failures)


def _row(result: Result, *, anonymous: bool) -> list[str]:
    rounds = result.rounds
    worst = max(rounds, key=lambda each: each.attack.gap_worst_ms)
    windows = [each.attack for each in rounds]
    health = [max(w.health_ms.get(s, 0.0) for w in windows) for s in ("frontend", "scheduler")]
    sent, answers = Counter[str](), Counter[str]()
    for each in rounds:
        sent.update(each.loot["sent"])
        answers.update(each.loot["answers"])
    got = [f"{count:,} {kind}" for kind, count in answers.most_common(_SHOWN) if count]
    if tokens := sum(each.loot["tokens"] for each in rounds):
        got.append(f"{tokens:,} tokens")
    return [
        result.name,
        _figures(
            result.median(lambda r: r.none.gap_p99_ms),
            result.median(lambda r: r.control.gap_p99_ms),
            result.median(lambda r: r.attack.gap_p99_ms),
        ),
        f"{result.p99_factor:.2f}\n({result.median(lambda r: r.p99_factor_alone):.2f})",
        _figures(worst.none.gap_worst_ms, worst.attack.gap_worst_ms),
        _figures(
            result.median(lambda r: r.none.first_p50_ms),
            result.median(lambda r: r.attack.first_p50_ms),
        ),
        _figures(*health, max(w.connect_ms for w in windows)),
        f"{result.median(lambda r: r.attackers_cores):.2f} + "
        f"{result.median(lambda r: r.extra_cores):.2f}",
        "\n".join(_memory(rounds, service) for service in _SERVICES),
        "\n".join(f"{count:,} {kind}" for kind, count in sent.items()),
        "\n".join(got) or "nothing",
        "\n".join(result.harm(anonymous=anonymous)) or "none",
    ]


def _memory(rounds: list[Round], service: str) -> str:
    peak = max(each.memory_peak_mb.get(service, 0.0) for each in rounds)
    before, after = rounds[0].memory_before_mb, rounds[-1].memory_after_mb
    return _figures(before.get(service, 0.0), peak, after.get(service, 0.0))


def _figures(*values: float) -> str:
    return ", ".join(f"{value:.0f}" for value in values)
