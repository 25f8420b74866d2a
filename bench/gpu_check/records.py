"""What the parts of a section found, as lines of JSON, so that a part that crashes or hangs leaves
behind what it knew."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

Status = Literal["running", "done", "skipped", "error", "crashed", "out of time"]

# Units of which less is better.
TIMES = ("ms", "us")


class SkipPart(Exception):
    """The part cannot run here; the message says why."""


@dataclass(frozen=True)
class Check:
    name: str
    error: float  # NaN fails
    bound: float
    detail: str = ""

    @property
    def passed(self) -> bool:
        return self.error <= self.bound


@dataclass(frozen=True)
class Figure:
    name: str
    value: float
    unit: str
    against: float | None = None  # in the same unit, what `ratio` is a share of
    target: float | None = None  # of the ratio

    @property
    def ratio(self) -> float | None:
        """1 is as good as `against`, more is better."""
        if not self.against or not self.value:
            return None
        return self.against / self.value if self.unit in TIMES else self.value / self.against


@dataclass
class Part:
    """What is known of a part of a section."""

    name: str
    status: Status = "running"
    message: str = ""
    seconds: float = 0.0
    checks: list[Check] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        return self.status not in ("done", "skipped") or not all(c.passed for c in self.checks)


@dataclass
class Records:
    """The file of a section, read."""

    limits: dict[str, float] = field(
        default_factory=dict
    )  # seconds, of the planned parts, in order
    parts: dict[str, Part] = field(default_factory=dict)  # of those that started

    @property
    def running(self) -> Part | None:
        return next((part for part in self.parts.values() if part.status == "running"), None)

    @property
    def left(self) -> list[str]:
        return [name for name in self.limits if name not in self.parts]


class Report:
    """Writes one section's file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._part = ""
        self._started = 0.0

    def read(self) -> Records:
        return read(self._path)

    def plan(self, limits: dict[str, float]) -> None:
        self._write("plan", limits=limits)

    def start(self, part: str) -> None:
        self._part, self._started = part, time.monotonic()
        self._write("start", name=part)

    def end(self, status: Status, message: str = "") -> None:
        seconds = time.monotonic() - self._started
        self._write("end", name=self._part, status=status, message=message, seconds=seconds)

    def check(self, name: str, error: float, bound: float, detail: str = "") -> None:
        self._write("check", **asdict(Check(name, error, bound, detail)))

    def figure(
        self,
        name: str,
        value: float,
        unit: str,
        against: float | None = None,
        target: float | None = None,
    ) -> None:
        self._write("figure", **asdict(Figure(name, value, unit, against, target)))

    def note(self, text: str) -> None:
        """A line for the table."""
        self._write("note", text=text)

    def detail(self, name: str, value: Any) -> None:
        """Something that only the JSON shows."""
        self._write("detail", name=name, value=value)

    def value(self, figure: str) -> float | None:
        """Of a figure that this or an earlier part wrote."""
        figures = (each for part in self.read().parts.values() for each in part.figures)
        return next((each.value for each in figures if each.name == figure), None)

    def _write(self, kind: str, **content: Any) -> None:
        append(self._path, kind, **content)


def append(path: Path, kind: str, **content: Any) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"kind": kind, **content}) + "\n")


def read(path: Path) -> Records:
    records = Records()
    part = Part("")
    for line in _lines(path):
        kind = line.pop("kind")
        if kind == "plan":
            records.limits = line["limits"]
        elif kind == "start":
            part = records.parts[line["name"]] = Part(line["name"])
        elif kind == "end":
            part = records.parts.setdefault(line["name"], Part(line["name"]))
            part.status, part.message = line["status"], line["message"]
            part.seconds = line["seconds"]
        elif kind == "check":
            part.checks.append(Check(**line))
        elif kind == "figure":
            part.figures.append(Figure(**line))
        elif kind == "note":
            part.notes.append(line["text"])
        else:
            part.details[line["name"]] = line["value"]
    return records


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if line.endswith("\n"):  # the last one may still be being written
            yield json.loads(line)


def as_json(value: Any) -> Any:
    """`value` with null for what JSON has no number for."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: as_json(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(each) for each in value]
    return value
