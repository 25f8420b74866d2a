"""The results of tests, as lines of JSON in one file to which all processes of a phase append, so
that one that crashes or hangs leaves its results behind."""

from __future__ import annotations

import json
import math
import os
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Outcome = Literal["running", "passed", "failed", "skipped", "crashed", "out of time", "stopped"]

# Prefixes a module's name when its kernels are only compiled, and no figure means anything.
COMPILING = "compile "

# Units in which less is better.
TIMES = ("s", "ms", "us")


@dataclass(frozen=True)
class Figure:
    name: str
    value: float
    unit: str
    against: float | None = None  # in the same unit, what `ratio` compares with
    target: float | None = None  # of the ratio

    @property
    def ratio(self) -> float | None:
        """The ratio to `against`: 1 is as good, more is better."""
        if not self.against or not self.value or math.isnan(self.value):
            return None
        return self.against / self.value if self.unit in TIMES else self.value / self.against

    @property
    def below(self) -> bool:
        return self.target is not None and (self.ratio or 0.0) < self.target


@dataclass
class Result:
    """One test or measurement, as far as it is known."""

    name: str
    outcome: Outcome = "running"
    message: str = ""
    seconds: float = 0.0
    limit_s: float | None = None  # its own
    properties: dict[str, Any] = field(default_factory=dict)
    figures: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        return self.outcome not in ("passed", "skipped")


@dataclass
class Records:
    """One module, as far as it is known."""

    planned: list[str] | None = None  # None: it has not been collected
    tests: dict[str, Result] = field(default_factory=dict)  # those that began

    @property
    def running(self) -> Result | None:
        return next((test for test in self.tests.values() if test.outcome == "running"), None)

    @property
    def left(self) -> list[str]:
        return [name for name in self.planned or () if name not in self.tests]

    @property
    def ended(self) -> int:
        return sum(test.outcome != "running" for test in self.tests.values())

    @property
    def failed(self) -> bool:
        return any(test.failed for test in self.tests.values())


class Journal:
    """The file, and the records read from it so far.

    Args:
        file: descriptor of a file open for reading and appending.
    """

    def __init__(self, file: int) -> None:
        self._file = file
        self._offset = 0
        self._modules: dict[str, Records] = {}

    def write(self, module: str, kind: str, **content: Any) -> None:
        line = json.dumps({"module": module, "kind": kind, **as_json(content)}) + "\n"
        os.write(self._file, line.encode())  # one call, so that lines do not mix

    def end(self, module: str, test: str, outcome: Outcome, message: str, seconds: float) -> None:
        self.write(module, "end", test=test, outcome=outcome, message=message, seconds=seconds)

    def read(self) -> dict[str, Records]:
        """Returns the records by module: the same objects every time, brought up to date."""
        unread = os.pread(self._file, os.fstat(self._file).st_size - self._offset, self._offset)
        whole = unread[: unread.rfind(b"\n") + 1]  # the last line may still be being written
        self._offset += len(whole)
        for line in whole.splitlines():
            with suppress(ValueError):  # a process was killed while it wrote, or the disk is full
                self._add(json.loads(line))
        return self._modules

    def of(self, module: str) -> Records:
        return self.read().setdefault(module, Records())

    def value(self, name: str, *, compiling: bool) -> Any:
        """The value of a figure or detail that any module wrote, while `compiling` or while not;
        None if there is none."""
        for module, records in self.read().items():
            for test in records.tests.values() if module.startswith(COMPILING) == compiling else ():
                if name in test.details:
                    return test.details[name]
                for figure in test.figures:
                    if figure.name == name:
                        return figure.value
        return None

    def _add(self, line: dict[str, Any]) -> None:
        records = self._modules.setdefault(line.pop("module"), Records())
        kind = line.pop("kind")
        if kind == "plan":
            records.planned = line["tests"]
            return
        name = line.pop("test")
        test = records.tests.setdefault(name, Result(name))
        if kind == "figure":
            value = math.nan if line["value"] is None else line["value"]
            test.figures.append(Figure(**line | {"value": value}))
        elif kind == "note":
            test.notes.append(line["text"])
        elif kind == "detail":
            test.details[line["name"]] = line["value"]
        else:  # start, end
            vars(test).update(line)


class Report:
    """Writes one test's measurements."""

    def __init__(self, journal: Journal, module: str, test: str) -> None:
        self._journal = journal
        self._names = module, test

    def figure(
        self,
        name: str,
        value: float,
        unit: str,
        against: float | None = None,
        target: float | None = None,
    ) -> None:
        """
        Args:
            against: the value to compare with, in the same unit.
            target: the ratio to reach, where 1 is as good and more is better, for times too.
        """
        self._write("figure", **asdict(Figure(name, value, unit, against, target)))

    def note(self, text: str) -> None:
        self._write("note", text=text)

    def detail(self, name: str, value: Any) -> None:
        """Writes something that only the JSON shows."""
        self._write("detail", name=name, value=value)

    def value(self, name: str) -> Any:
        """The value of a figure or detail that this or an earlier test of the run wrote."""
        return self._journal.value(name, compiling=self._names[0].startswith(COMPILING))

    def _write(self, kind: str, **content: Any) -> None:
        module, test = self._names
        self._journal.write(module, kind, test=test, **content)


def as_json(value: Any) -> Any:
    """Returns `value` with null for numbers that JSON cannot express."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): as_json(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(each) for each in value]
    return value
