"""Flags and tables that the modes of `python -m bench` have in common."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

# The module of each mode.
MODES = {
    "stack": "bench.stack_mode",
    "steps": "bench.steps",
    "scheduler": "bench.scheduler_mode",
    "load": "bench.load_mode",
    "http": "bench.http_mode",
    "speculation": "bench.speculation",
    "quality": "bench.quality",
    "kill": "bench.kill",
    "recovery": "bench.recovery",
    "peers": "bench.peers.compare",
    "embeddings": "bench.embeddings",
    "cache-dir": "bench.cache_dir",
}


def mode_parser(
    mode: str, description: str | None, model: str | None = "models/demo"
) -> argparse.ArgumentParser:
    """A parser with the flags of all modes.

    Args:
        model: the default of `--model`; None if the mode has no model.
    """
    parser = argparse.ArgumentParser(prog=f"python -m bench --mode {mode}", description=description)
    parser.add_argument(
        "--mode", choices=MODES, help="what to measure, stack by default; each mode has other flags"
    )
    parser.add_argument("--out", type=Path, default=Path("bench.json"), help="%(default)s")
    if model is not None:
        parser.add_argument("--model", default=model, help="what MODEL takes; %(default)s")
    return parser


def check_minimum(
    parser: argparse.ArgumentParser, options: argparse.Namespace, minimum: int, names: Sequence[str]
) -> None:
    """Ends the program if an option of `names`, or one of its values, is below `minimum`."""
    for name in names:
        value = getattr(options, name)
        if min(value if isinstance(value, list) else [value]) < minimum:
            parser.error(f"--{name.replace('_', '-')}: must be at least {minimum}")


def check_lengths(
    parser: argparse.ArgumentParser,
    options: argparse.Namespace,
    names: Sequence[str] = ("input", "output"),
) -> None:
    for name in names:
        if not 1 <= getattr(options, f"min_{name}") <= getattr(options, f"max_{name}"):
            parser.error(f"--min-{name}: must be at least 1 and at most --max-{name}")


def print_table(
    console: Console, title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]
) -> None:
    """Prints a table; each row has a label and numbers."""
    table = Table(title=title)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def figure_rows(
    figures: Sequence[dict[str, object]], rows: Sequence[tuple[str, str, str]]
) -> Iterable[list[str]]:
    """Yields a row for each label, name in `figures` and format, with a column for each element."""
    for label, name, pattern in rows:
        values = [each[name] for each in figures]
        yield [label, *("n/a" if v is None else pattern.format(v) for v in values)]
