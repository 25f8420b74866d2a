"""The records of a run: lines of JSON in one file, to which all processes of the run append. The
file keeps the results of processes that crash or hang."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

Outcome = Literal["not run", "running", "passed", "failed", "skipped", "crashed"]

# Units of which smaller values are better.
TIMES = ("s", "ms", "us")


@dataclass(frozen=True)
class Figure:
    name: str
    value: float
    unit: str
    against: float | None = None  # the value that `ratio` compares with, in the figure's unit
    target: float | None = None  # the ratio to reach

    @property
    def ratio(self) -> float | None:
        """The ratio to `against`. 1 means equally good; larger is better, for times too."""
        if not self.against or not self.value or math.isnan(self.value):
            return None
        return self.against / self.value if self.unit in TIMES else self.value / self.against

    @property
    def below(self) -> bool:
        return self.target is not None and (self.ratio or 0.0) < self.target

    def __str__(self) -> str:
        ratio = "" if self.ratio is None else f"{self.ratio:.2f}"
        against = "" if self.against is None else f"of {self.against:,.4g}"
        target = "" if self.target is None else f"target {self.target:.2f}"
        below = "BELOW" if self.below else ""
        value = f"{self.value:,.5g} {self.unit}"
        return f"{self.name:<52} {value:>18} {against:<11} {ratio:>5} {target:<11} {below}".rstrip()


@dataclass
class Result:
    """The results so far of a test or measurement."""

    name: str
    outcome: Outcome = "not run"
    ended: bool = False
    message: str = ""  # why the test failed or was skipped
    seconds: float = 0.0
    figures: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        return self.outcome in ("failed", "crashed")

    def to_json(self) -> dict[str, Any]:
        figures = [{**asdict(f), "ratio": f.ratio, "below": f.below} for f in self.figures]
        content = asdict(self) | {"figures": figures}
        return {key: value for key, value in content.items() if value or key == "seconds"}

    def __str__(self) -> str:
        """A line with the outcome, then one for each figure, note and line of the message."""
        lines = [f"{self.name.rpartition('::')[2]}: {self.outcome} ({self.seconds:.1f} s)"]
        lines += map(str, self.figures)
        return "\n".join([*lines, *self.notes, *self.message.splitlines()])

    def add(self, kind: str, value: Any) -> None:
        """Adds a record to the result."""
        if kind == "started":
            self.outcome = "running"
        elif kind == "figure":
            self.figures.append(Figure(**value))
        elif kind == "note":
            self.notes.append(value)
        elif kind == "details":
            self.details |= value
        elif kind == "report":
            self._add_report(**value)

    def _add_report(self, when: str, outcome: str, message: str, seconds: float) -> None:
        """Adds pytest's report of a test's setup, call, teardown or crash."""
        if self.ended:  # the test was reported before it killed its process
            return
        self.seconds += seconds
        if outcome == "failed":
            self.outcome = "crashed" if when == "crash" else "failed"
            self.message += f"{when}: {message}\n"
        elif outcome == "skipped" and self.outcome == "running":
            self.outcome, self.message = "skipped", message
        self.ended = when not in ("setup", "call")
        if self.ended and self.outcome == "running":
            self.outcome = "passed"


class Report:
    """Writes one test's measurements."""

    def __init__(self, path: Path, test: str) -> None:
        self._path = path
        self._test = test

    def figure(
        self,
        name: str,
        value: float,
        unit: str,
        against: float | None = None,
        target: float | None = None,
    ) -> None:
        """Writes a figure.

        Args:
            against: the value to compare with, in the figure's unit.
            target: the ratio to reach, see `Figure.ratio`.
        """
        figure = Figure(name, value, unit, against, target)
        append(self._path, self._test, "figure", asdict(figure))

    def note(self, text: str) -> None:
        append(self._path, self._test, "note", text)

    def detail(self, name: str, value: Any) -> None:
        """Writes a value that only the JSON shows."""
        append(self._path, self._test, "details", {name: value})

    def value(self, name: str) -> Any:
        """The value of a figure or detail that this or an earlier test of the run wrote; None if no
        test did."""
        for result in read(self._path).values():
            if name in result.details:
                return result.details[name]
            for figure in result.figures:
                if figure.name == name:
                    return figure.value
        return None


def append(path: Path, test: str, kind: str, value: Any = None) -> None:
    line = json.dumps({"test": test, "kind": kind, "value": value}) + "\n"
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, line.encode())  # a single call, so that lines do not mix
    finally:
        os.close(file)


def read(path: Path) -> dict[str, Result]:
    """The results so far, by test."""
    results: dict[str, Result] = {}
    for line in path.read_bytes().splitlines():
        try:
            record = json.loads(line)
        except ValueError:  # the line is being written, or its process was killed meanwhile
            continue
        name = record["test"]
        results.setdefault(name, Result(name)).add(record["kind"], record["value"])
    return results


def as_json(value: Any) -> Any:
    """Returns `value` with null for numbers that JSON cannot express."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): as_json(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(each) for each in value]
    return value
