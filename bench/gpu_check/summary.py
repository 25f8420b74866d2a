"""The result as JSON, and as a table."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.gpu_check.records import Check, Figure, Part, Records, as_json

MOST_FAILURES = 5  # that the table shows of a part
LONGEST_MESSAGE = 160


def write_json(path: Path, about: Mapping[str, Any], sections: Mapping[str, Records]) -> None:
    """
    Args:
        about: what is known of the run as a whole.
        sections: by name.
    """
    parts = {name: _parts(records) for name, records in sections.items()}
    content = as_json({**about, "passed": passed(sections), "sections": parts})
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def passed(sections: Mapping[str, Records]) -> bool:
    """Whether nothing failed; a target that is not reached is no failure."""
    return not any(part.failed for records in sections.values() for part in records.parts.values())


def table(sections: Mapping[str, Records]) -> Iterator[str]:
    """Lines."""
    named = [
        (f"{name}/{part.name}", part)
        for name, records in sections.items()
        for part in records.parts.values()
    ]
    for name, part in named:
        yield f"{name:<34} {verdict(part):<12} {_summary(part)}"
        yield from (f"    {line}" for line in _failures(part))
    figures = [(name, figure) for name, part in named for figure in part.figures]
    if figures:
        yield ""
        yield f"{'':<62} {'figure':>14} {'against':>12} {'ratio':>6} {'target':>6}"
        yield from (_figure_line(name, figure) for name, figure in figures)


def verdict(part: Part) -> str:
    if part.status != "done":
        return part.status
    return "FAILED" if part.failed else "pass" if part.checks else "measured"


def _parts(records: Records) -> dict[str, Any]:
    found = {}
    for part in records.parts.values():
        content = asdict(part)
        del content["name"]
        content["checks"] = [{**asdict(c), "passed": c.passed} for c in part.checks]
        content["figures"] = [{**asdict(f), "ratio": f.ratio} for f in part.figures]
        found[part.name] = content
    return found


def _summary(part: Part) -> str:
    pieces = []
    if part.checks:
        worst = max(part.checks, key=_severity)
        error = f"worst {worst.error:.1e} of {worst.bound:.1e}" if worst.bound else "exact"
        if not worst.bound and not worst.passed:
            error = f"{worst.error:.0f} {worst.detail}"
        pieces.append(f"{len(part.checks)} checks, {error} ({worst.name})")
    elif part.message:
        pieces.append(_last_line(part.message))
    pieces.extend(part.notes)
    return "; ".join(pieces)


def _severity(check: Check) -> float:
    """How near to its bound, or how far past it."""
    if check.error != check.error:
        return float("inf")
    return check.error / check.bound if check.bound else (1e9 if check.error else 0.0)


def _failures(part: Part) -> Iterator[str]:
    failed = [check for check in part.checks if not check.passed]
    for check in failed[:MOST_FAILURES]:
        yield f"{check.name}: {check.error:.3g}, bound {check.bound:.3g} {check.detail}".rstrip()
    if len(failed) > MOST_FAILURES:
        yield f"and {len(failed) - MOST_FAILURES} more"
    if part.checks and part.status not in ("done", "skipped"):
        yield _last_line(part.message)


def _last_line(message: str) -> str:
    return message.strip().splitlines()[-1][:LONGEST_MESSAGE]


def _figure_line(part: str, figure: Figure) -> str:
    against = "" if figure.against is None else f"{figure.against:,.4g}"
    ratio = "" if figure.ratio is None else f"{figure.ratio:.2f}"
    target = "" if figure.target is None else f"{figure.target:.2f}"
    below = "  below" if figure.target and (figure.ratio or 0) < figure.target else ""
    value = f"{figure.value:,.4g} {figure.unit}"
    return (
        f"{part + ': ' + figure.name:<62} {value:>14} {against:>12} {ratio:>6} {target:>6}{below}"
    )
