"""The results of a run: lines of JSON in one file, to which all processes of the run append. The
file keeps the results of processes that crash or hang."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

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


class Report:
    """Prints one test's measurements, and appends them to the file."""

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
        """Reports a figure.

        Args:
            against: the value to compare with, in the figure's unit.
            target: the ratio to reach, see `Figure.ratio`.
        """
        figure = Figure(name, value, unit, against, target)
        print(figure, flush=True)
        record = asdict(figure) | {"ratio": figure.ratio, "below": figure.below}
        append(self._path, test=self._test, line=str(figure), **record)

    def note(self, text: str) -> None:
        print(text, flush=True)
        append(self._path, test=self._test, note=text)

    def detail(self, name: str, value: Any) -> None:
        """Reports a value that only the file shows."""
        append(self._path, test=self._test, name=name, value=value)

    def value(self, name: str) -> Any:
        """The value of a figure or detail that this or an earlier test of the run reported; None if
        no test did."""
        return next((each["value"] for each in read(self._path) if each.get("name") == name), None)


def append(path: Path, **record: Any) -> None:
    with path.open("ab", buffering=0) as file:
        # A single call, so that lines do not mix.
        file.write(json.dumps(_as_json(record)).encode() + b"\n")


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the records so far."""
    for line in path.read_bytes().splitlines():
        try:
            yield json.loads(line)
        except ValueError:  # the line is being written, or its process was killed meanwhile
            continue


def outcomes(path: Path) -> dict[str, str]:
    """The outcome so far of each test: not run, passed, failed, skipped or crashed."""
    found: dict[str, str] = {}
    for record in read(path):
        outcome, test = record.get("outcome"), record.get("test", "")
        # A process that lost the GPU ends after the test that failed.
        if outcome and not (outcome == "crashed" and found.get(test) == "failed"):
            found[test] = outcome
    return {test: outcome for test, outcome in found.items() if outcome != "ended"}  # a file


def _as_json(value: Any) -> Any:
    """Returns `value` with null for numbers that JSON cannot express."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): _as_json(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(each) for each in value]
    return value
