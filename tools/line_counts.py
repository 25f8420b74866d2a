"""`python -m tools.line_counts`: writes the table of line counts into the documents.

`make check` uses `--check`, which writes nothing and fails if a number is off by more than a tenth.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "results" / "other-servers.md"
BEGIN, END = "<!-- lines: python -m tools.line_counts -->\n", "<!-- end of lines -->\n"
# (name in the table, folder, subfolders that are left out)
PARTS = (
    ("frontend", "frontend", ()),
    ("scheduler", "scheduler_svc", ()),
    ("worker", "worker_svc", ()),
    ("shared by the three", "shared", ("pb",)),
    ("client library", "nano_vllm_grpc", ("pb",)),
    ("launcher", "deploy", ()),
    ("command line", "cli", ()),
)


def table(root: Path) -> str:
    """A table with a row per part and one for all of them: the number of Python files, their lines,
    the median file's lines and the largest file's."""
    parts = {
        title: {path: _lines(path) for path in _files(root / folder, others)}
        for title, folder, others in PARTS
    }
    parts["all of these"] = {path: lines for part in parts.values() for path, lines in part.items()}
    rows = ["| part | files | lines | median file | largest file |", "|---|--:|--:|--:|--:|"]
    for title, counts in parts.items():
        largest = max(counts, key=counts.__getitem__)
        rows.append(
            f"| {title} | {len(counts)} | {sum(counts.values()):,} | "
            f"{median(counts.values()):.0f} | "
            f"[{counts[largest]}](../../{largest.relative_to(root).as_posix()}) |"
        )
    return "\n".join(rows) + "\n"


def _files(folder: Path, others: tuple[str, ...]) -> list[Path]:
    """The non-empty Python files in `folder`, except in `others`."""
    return [
        path
        for path in sorted(folder.rglob("*.py"))
        if path.relative_to(folder).parts[0] not in others and path.stat().st_size
    ]


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n")


def replace_table(text: str, new: str, begin: str = BEGIN, end: str = END) -> str:
    """Replaces what is between two markers.

    Raises:
        ValueError: the text lacks a marker.
    """
    before, found_begin, rest = text.partition(begin)
    _, found_end, after = rest.partition(end)
    if not (found_begin and found_end):
        raise ValueError(f"no {begin.strip()} … {end.strip()}")
    return before + begin + new + end + after


def is_close(old: str, new: str) -> bool:
    """Whether two tables have the same rows, with numbers that differ by at most a tenth."""
    olds, news = _numbers(old), _numbers(new)
    return len(olds) == len(news) and all(
        abs(a - b) <= max(a, b) / 10 for a, b in zip(olds, news, strict=True)
    )


def _numbers(table: str) -> list[int]:
    return [int(found.replace(",", "")) for found in re.findall(r"\d[\d,]*", table)]


def main(args: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.line_counts")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args(args)
    page, new = PAGE.read_text(encoding="utf-8"), table(ROOT)
    if options.check:
        old = page.partition(BEGIN)[2].partition(END)[0]
        if is_close(old, new):
            return 0
        print(f"{PAGE}: the line counts are out of date: python -m tools.line_counts")
        return 1
    PAGE.write_text(replace_table(page, new), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
