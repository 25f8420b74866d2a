"""`python -m tools.models_table`: writes the table of model families into docs/models.md.

`make check` uses `--check`, which writes nothing and fails if the table is out of date.
"""

from __future__ import annotations

import argparse
import sys

from tools.readme_lines import ROOT, replace_table
from worker_svc.models.families import FAMILIES

BEGIN, END = "<!-- families: python -m tools.models_table -->\n", "<!-- end of families -->\n"
PAGE = ROOT / "docs" / "models.md"


def table() -> str:
    """A table with a row per family."""
    rows = [
        "| Models | `architectures` in config.json | `general.architecture` of GGUF files "
        "| Tool calls are read as | Reasoning is read as |",
        "|---|---|---|---|---|",
    ]
    for family in FAMILIES.values():
        parsers = [family.tool_call_parser, family.reasoning_parser]
        cells = [family.models, f"`{family.architecture}`", f"`{family.gguf}`"]
        cells += [f"`{parser}`" if parser else "not read" for parser in parsers]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def main(args: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.models_table")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args(args)
    text = PAGE.read_text(encoding="utf-8")
    new = replace_table(text, table(), BEGIN, END)
    if options.check and new != text:
        print("docs/models.md: the table is out of date: python -m tools.models_table")
        return 1
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
