"""The documents name what there is: each row of the tables that promise something names tests that
CI runs, in its last column (`FILE::test_x`, and `::test_y` in the file before), and the runbook has
each alert."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PROMISES = {  # the sections with such tables
    "concepts/guarantees.md": {"Promises"},
    "internals/failure-detection.md": {"Who notices what"},
    "internals/threat-model.md": {"Who may do what", "What bounds a client"}
    | {"What bounds a process", "Caches on disk", "Structured output"},
}
WARNINGS = ("Triton's compiled kernels",)  # rows that promise nothing


@cache
def statements(path: Path) -> list[ast.stmt]:
    return ast.parse(path.read_text()).body if path.is_file() else []


def problem(file: str, name: str) -> str:
    """The reason why CI does not run this test, or nothing."""
    for node in statements(TESTS / file):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets) == "pytestmark":
            if "pytest.mark.soak" in ast.unparse(node.value):
                return "is in a module that is left to the soak"
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            left = "pytest.mark.soak" in map(ast.unparse, node.decorator_list)
            return "is left to the soak" if left else ""
    paths = [path for path in TESTS.rglob("test_*.py") if f"def {name}(" in path.read_text()]
    elsewhere = ", ".join(str(path.relative_to(TESTS)) for path in paths) or "no file"
    return f"does not exist; a test of this name is in {elsewhere}"


@pytest.mark.parametrize("document", PROMISES)
def test_each_row_names_tests_that_ci_runs(document: str) -> None:
    section, left, problems = "", set(PROMISES[document]), []
    for line in (TESTS.parent / "docs" / document).read_text().splitlines():
        if line.startswith("#"):
            section = line.lstrip("# ")
        if section not in PROMISES[document] or not line.startswith("|") or set(line) <= set("|-"):
            continue
        first, *_, last = (cell.strip() for cell in line.strip("|").split("|"))
        if last == "test":  # the header
            left.discard(section)
            continue
        row, file = f'docs/{document}, "{section}", row "{first}"', ""
        entries = re.findall(r"`([^`]*)::(test_\w+)`", last)
        form = ", ".join(f"`{own}::{name}`" for own, name in entries)
        if not last or last != ("–" if first in WARNINGS else form):
            problems.append(f"{row}: the last cell is not `FILE::test_x`, `::test_y`: {last}")
        for own, name in entries:
            file = own or file
            if reason := problem(file, name):
                problems.append(f"{row}: {file}::{name} {reason}")
    assert not problems, "\n".join(("", *problems))
    assert not left, "sections without a table that ends with a column `test`"


RUNBOOK = (TESTS.parent / "docs" / "operate" / "runbook.md").read_text()


def test_the_runbook_has_each_alert() -> None:
    alerts = (TESTS.parent / "deploy" / "observability" / "alerts.yml").read_text()
    names = re.findall(r"- alert: (\w+)", alerts)
    assert names
    assert set(names) == set(re.findall(r"^### (\w+)$", RUNBOOK.partition("## Lines")[0], re.M))


def test_the_runbook_has_each_check_of_doctor() -> None:
    """That is, each name and state with which a check can end, except `ok`."""
    ends = {
        tuple(ast.literal_eval(each) for each in node.args[:2])
        for file in (TESTS.parent / "cli" / "doctor").glob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Check"
        if all(isinstance(each, ast.Constant) for each in node.args[:2])
    }
    rows = set(re.findall(r"^\| `([^`]+)` \| (\w+) \|", RUNBOOK, re.M))
    assert {end for end in ends if end[1:] and end[1] != "ok"} - rows == set()
    assert len(rows) > 5
