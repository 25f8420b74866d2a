"""`python -m tools.readme_lines`: writes the table of line counts into README.md.

`--check` writes nothing, and fails where the table is not that of the code. A test runs it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- lines: python -m tools.readme_lines -->\n", "<!-- end of lines -->\n"
# (what the table calls it, the folder, folders in it that are not of it)
PARTS = (
    ("frontend", "frontend", ("client",)),
    ("scheduler", "scheduler_svc", ()),
    ("worker", "worker_svc", ()),
    ("shared by the three", "shared", ("pb",)),
    ("client library", "frontend/client", ()),
    ("launcher", "deploy", ()),
)


def table(root: Path) -> str:
    """A row per part and one of all: Python files, their lines, the median and the largest file."""
    parts = {
        title: {path: _lines(path) for path in _files(root / folder, others)}
        for title, folder, others in PARTS
    }
    parts["all of these"] = {path: lines for part in parts.values() for path, lines in part.items()}
    rows = ["| | files | lines | median | largest |", "|---|---|---|---|---|"]
    for title, counts in parts.items():
        largest = max(counts, key=counts.__getitem__)
        rows.append(
            f"| {title} | {len(counts)} | {sum(counts.values()):,} | "
            f"{median(counts.values()):.0f} | "
            f"[{counts[largest]}]({largest.relative_to(root).as_posix()}) |"
        )
    return "\n".join(rows) + "\n"


def _files(folder: Path, others: tuple[str, ...]) -> list[Path]:
    """Python files that are not empty."""
    return [
        path
        for path in sorted(folder.rglob("*.py"))
        if path.relative_to(folder).parts[0] not in others and path.stat().st_size
    ]


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n")


def replace_table(readme: str, new: str) -> str:
    """Raises:
    ValueError: the readme lacks a marker.
    """
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"README.md: no {BEGIN.strip()} … {END.strip()}")
    return before + begin + new + end + after


def main(args: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.readme_lines")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args(args)
    path = ROOT / "README.md"
    old = path.read_text(encoding="utf-8")
    new = replace_table(old, table(ROOT))
    if options.check:
        if new != old:
            print("README.md: line counts have changed: python -m tools.readme_lines")
        return int(new != old)
    path.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
