"""The language of documents is checked as `[tool.prose]` says."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from tools.prose import main, problems

ROOT = Path(__file__).parents[2]
PROSE = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["prose"]
GOOD = """# A title

This page shows how to start a stack.

| name | test |
|---|---|
| a value | `a.py::test_of_so_many_words`, the column of tests is not prose. It may be long |

- The worker listens on port 5. It needs 84% of the memory (`x` of it).
"""


def test_plain_text_has_no_problem() -> None:
    assert list(problems(GOOD, PROSE)) == []


@pytest.mark.parametrize(
    ("bad", "line", "problem"),
    [
        (f"It is {'very ' * 25}long.", 11, "a sentence of 28 words"),
        ("A worker: a process: it computes.", 11, "a chain of colons"),
        ("Then the stream goes on.", 11, "write continues or resumes"),
        ("The loss is 84 %.", 11, "without a space"),
        ("What waits is aborted.", 11, "the noun as the subject"),
        ("Its behaviour is tested.", 11, "American English"),
        ("| | b |\n|---|---|\n| 1 | 2 |", 11, "without a name"),
        ("| a | b |\n|---|---|\n| 1 | It waits. Then it ends. |", 13, "several sentences"),
        (f"| a | b |\n|---|---|\n| 1 | {'word ' * 21} |", 13, "21 words in a table cell"),
    ],
)
def test_each_problem_is_found_with_its_line(bad: str, line: int, problem: str) -> None:
    ((found_line, found),) = problems(f"{GOOD}\n{bad}\n", PROSE)
    assert (found_line, problem in found) == (line, True), found


def test_a_page_begins_with_a_paragraph() -> None:
    ((line, found),) = problems("# A title\n\n- a list\n", PROSE)
    assert line == 1
    assert "begins with" in found


def test_a_link_to_a_missing_file_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A page\n\nThis [page](page.md#x) links to [another](other.md).\n")
    assert main([str(page)]) == 1
    assert "page.md:3: other.md does not exist" in capsys.readouterr().out
