"""Formats results as JSON and as a few lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from bench.gpu.records import Figure, Records, Result

MAX_LINES = 20
LINE_LENGTH = 118


def module_json(records: Records) -> dict[str, Any]:
    tests = {}
    for name, test in records.tests.items():
        figures = [{**asdict(f), "ratio": f.ratio, "below": f.below} for f in test.figures]
        content = asdict(test) | {"figures": figures}
        tests[name] = {key: value for key, value in content.items() if value or key == "seconds"}
    seconds = sum(test.seconds for test in records.tests.values())
    return {"verdict": verdict(records), "seconds": seconds, "tests": tests}


def compiled_json(records: Records) -> dict[str, Any]:
    """The results of compiling, without figures, which mean nothing."""
    tests = records.tests.values()
    messages = {test.name: test.message for test in tests if test.failed}
    seconds = sum(test.seconds for test in tests)
    return {"verdict": verdict(records), "seconds": seconds, "failed": messages}


def verdict(records: Records) -> str:
    """Counts outcomes, as in `30 passed, 1 failed`; failures come last."""
    counts: Counter[str] = Counter(test.outcome for test in records.tests.values())
    order = ("passed", "skipped", "failed", "crashed", "out of time", "stopped", "running")
    return ", ".join(f"{counts[outcome]} {outcome}" for outcome in order if counts[outcome])


def summary(results: Mapping[str, Records], end: str) -> list[str]:
    """At most MAX_LINES lines: failures, then figures that have a target.

    Args:
        end: the last line.
    """
    room = MAX_LINES - 2
    total = Records(tests={str(n): test for n, (_, test) in enumerate(_tests(results))})
    lines = [verdict(total) or "nothing was run"]
    failed = [_failure(name, test) for name, test in _tests(results) if test.failed]
    last_first = dict(reversed(list(results.items())))  # the stack before its parts
    figures = [figure for _, test in _tests(last_first) for figure in test.figures]
    targets = [figure for figure in figures if figure.target is not None]
    # Failures come first, but leave half of the room to the targets.
    lines += _fitted(failed, room - min(len(targets), room // 2), "failed: {} more")
    room -= len(lines) - 1
    lines += _fitted([_figure(figure) for figure in targets], room, "{} more figures")
    return [line[:LINE_LENGTH] for line in [*lines, end]]


def details(test: Result) -> Iterator[str]:
    """A line with the outcome, then one for each figure, note and line of the failure."""
    yield f"{test.name.rpartition('::')[2]}: {test.outcome} ({test.seconds:.1f} s)"
    yield from map(_figure, test.figures)
    yield from test.notes
    yield from test.message.splitlines()


def _tests(results: Mapping[str, Records]) -> Iterator[tuple[str, Result]]:
    for name, records in results.items():
        for test in records.tests.values():
            yield name, test


def _fitted(lines: Sequence[str], room: int, rest: str) -> list[str]:
    """The lines that there is room for, and the number left out."""
    if len(lines) <= room:
        return list(lines)
    return [*lines[: room - 1], rest.format(len(lines) - room + 1)]


def _failure(module: str, test: Result) -> str:
    name = test.name.rpartition("::")[2]
    lines = [line for line in test.message.splitlines() if line.strip()] or [""]
    # pytest's report begins with a location and marks the error with E; a log ends with the error.
    errors = [line.removeprefix("E").strip() for line in lines if line.startswith("E ")]
    reason = errors[0] if errors else ": ".join(dict.fromkeys((lines[0], lines[-1])))
    return f"{test.outcome}: {module}: {name}: {reason}"


def _figure(figure: Figure) -> str:
    ratio = "" if figure.ratio is None else f"{figure.ratio:.2f}"
    against = "" if figure.against is None else f"of {figure.against:,.4g}"
    target = "" if figure.target is None else f"target {figure.target:.2f}"
    below = "BELOW" if figure.below else ""
    value = f"{figure.value:,.5g} {figure.unit}"
    return f"{figure.name:<52} {value:>18} {against:<11} {ratio:>5} {target:<11} {below}".rstrip()
