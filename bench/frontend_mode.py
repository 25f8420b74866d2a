"""`python -m bench --mode frontend`: measures the tokens/s that frontends deliver to open streams.

Real frontend processes run between client processes that hold the streams open and a scheduler, in
this process, that makes tokens without an engine. See docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.errors import BenchError
from bench.frontend_rig import Run, running
from bench.machine import this_machine

WARM_UP_TOKENS = 16  # per call


def parse_args(args: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench --mode frontend", description=__doc__)
    parser.add_argument("--model", default="models/demo", help="%(default)s")
    parser.add_argument("--calls", type=int, default=256, help="open streams, %(default)s")
    parser.add_argument(
        "--rate", type=float, default=20_000.0, help="tokens/s of the paced run, %(default)s"
    )
    parser.add_argument("--tokens", type=int, default=400, help="per call, %(default)s")
    parser.add_argument("--out", type=Path, default=Path("bench.json"), help="%(default)s")
    options = parser.parse_args(args)
    for name in ("calls", "rate", "tokens"):
        if getattr(options, name) <= 0:
            parser.error(f"--{name}: must be over 0")
    return options


async def measure(options: argparse.Namespace, console: Console) -> list[Run]:
    """
    Raises:
        BenchError: a process failed.
    """
    runs = []
    async with running(options.model, options.calls) as rig:
        for name in ("one frontend", "two frontends"):
            with console.status(name):
                await rig.add_frontend()
                await rig.run("warm-up", WARM_UP_TOKENS, None)
                runs.append(await rig.run(f"{name}, paced", options.tokens, options.rate))
                # Flat out, the same number of tokens would take fewer seconds.
                runs.append(await rig.run(f"{name}, flat out", 4 * options.tokens, None))
    return runs


def to_json(runs: list[Run], options: argparse.Namespace) -> dict[str, Any]:
    one, two = (run.tokens_per_s for run in runs if run.offered_tokens_per_s is None)
    return {
        "mode": "frontend",
        "model": options.model,
        "calls": options.calls,
        "tokens_per_s": one,
        "tokens_per_s_two_frontends": two,
        "scaling": two / one,
        "runs": [dataclasses.asdict(run) for run in runs],
        **dataclasses.asdict(this_machine()),
    }


def print_table(runs: list[Run], options: argparse.Namespace, console: Console) -> None:
    table = Table(title=f"{options.calls} open streams")
    table.add_column("")
    for run in runs:
        table.add_column(run.name, justify="right")
    for label, name, pattern in _ROWS:
        values = [getattr(run, name) for run in runs]
        table.add_row(label, *("n/a" if v is None else pattern.format(v) for v in values))
    console.print(table)


_ROWS = (
    ("tokens/s", "tokens_per_s", "{:,.0f}"),
    ("tokens per chunk", "tokens_per_chunk", "{:.2f}"),
    ("frontend CPU, s per 1,000 tokens", "frontend_cpu_s_per_1000_tokens", "{:.4f}"),
    ("client CPU, s per 1,000 tokens", "client_cpu_s_per_1000_tokens", "{:.4f}"),
    ("latency p50, s", "latency_p50_s", "{:.4f}"),
    ("latency p99, s", "latency_p99_s", "{:.4f}"),
    ("calls per frontend", "calls_per_frontend", "{}"),
)


def main(args: list[str]) -> int:
    options = parse_args(args)
    console = Console()
    try:
        runs = asyncio.run(measure(options, console))
    except BenchError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print_table(runs, options, console)
    options.out.write_text(json.dumps(to_json(runs, options), indent=2) + "\n", encoding="utf-8")
    console.print(f"written: {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
