"""`python -m tools.reference`: writes the pages of docs/reference from the code.

`make check` uses `--check`, which writes nothing, lists the pages that are out of date and fails.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from tools.house import ROOT
from tools.reference import cli, errors, grpc, limits, metrics, models, sampling, settings

FOLDER = ROOT / "docs" / "reference"
PAGES: Mapping[str, Callable[[], str]] = {
    "cli.md": cli.page,
    "settings.md": settings.page,
    "grpc.md": grpc.page,
    "sampling.md": sampling.page,
    "metrics.md": metrics.page,
    "errors.md": errors.page,
    "limits.md": limits.page,
    "models.md": models.page,
}


def stale(folder: Path) -> Iterator[tuple[str, str]]:
    """Yields the name and the new text of each page that is missing or out of date in `folder`."""
    for name, page in PAGES.items():
        path, text = folder / name, page()
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            yield name, text


def main(args: Sequence[str], folder: Path = FOLDER) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.reference")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if pages differ")
    options = parser.parse_args(args)
    found = list(stale(folder))
    for name, text in found:
        if options.check:
            print(f"docs/reference/{name}: out of date: python -m tools.reference")
        else:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8")
    return 1 if found and options.check else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
