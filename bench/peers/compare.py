"""`python -m bench --mode peers`: compares this server with others on one machine, in one run in
which they take turns. See docs/results/peers.md."""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.peers.driver import ENTRIES, FILE, FULL, TINY, Entry, Job
from bench.peers.installed import HOME, ROOT, converted, is_gguf, python
from bench.report import check_minimum, mode_parser, print_table
from bench.workload import TEMPERATURE, BenchError, read_tokens
from deploy.model import model_name, resolve_model

TIMEOUT_S = 3600.0
_REASON_LINES = 12
# By name in `driver.Figures`.
_COLUMNS = {
    "output_tokens_per_s": ("tokens/s", "{:.1f}"),
    "cores_busy": ("cores", "{:.2f}"),
    "single_stream_tokens_per_s": ("one stream", "{:.1f}"),
    "ttft_1024_s": ("first of 1024", "{:.2f}"),
    "start_s": ("start, s", "{:.1f}"),
}


def parse_args(args: list[str]) -> argparse.Namespace:
    names = [entry.name for entry in ENTRIES]
    parser = mode_parser("peers", __doc__)
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME",
                        help=f"default: {', '.join(names)}")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=3, help="%(default)s")
    parser.add_argument("--tiny", action="store_true", help="a few tokens: does everything run?")
    options = parser.parse_args(args)
    check_minimum(parser, options, 1, ["rounds"])
    return options


def measure(options: argparse.Namespace, console: Console) -> Iterator[dict[str, Any]]:
    """Yields all results after each entry's turn. An entry that fails does not stop the others.

    Raises:
        BenchError: a server is not installed, or an entry failed.
        LaunchError: there is no such model.
    """
    model = resolve_model(options.model).resolve()
    entries = [entry for entry in ENTRIES if entry.name in options.only]
    if not is_gguf(model):
        entries = [entry for entry in entries if entry.weights != FILE]
    for entry in entries:
        python(entry.peer)
    sizes, text = TINY if options.tiny else FULL, read_tokens(model)
    # The output of an entry's driver in each round, or the reason for its failure.
    rounds: dict[Entry, list[dict[str, Any]]] = {entry: [] for entry in entries}
    name = model_name(options.model, model)
    workload = {**asdict(sizes), "temperature": TEMPERATURE}
    found: dict[str, Any]
    for _ in range(options.rounds):
        for entry in entries:
            try:
                job = Job(str(converted(entry, model)), text, entry, sizes, time.monotonic())
                found = {"answer": run_driver(entry, job), "error": None}
                said = found["answer"]["figures"]
            except BenchError as error:
                said = str(error)
                found = {"answer": None, "error": said}
            rounds[entry].append(found)
            console.print(f"{entry.name}: {said}", markup=False)
            results = [
                {**asdict(each), **figures(so_far), "rounds": so_far}
                for each, so_far in rounds.items()
            ]
            yield {"model": name, "workload": workload, "entries": results}
    rows = [[each["name"], each["cache"], *_cells(each)] for each in results]
    columns = ["", "cache", *(label for label, _ in _COLUMNS.values())]
    title = f"{name}: medians of {options.rounds} (min–max)"
    print_table(console, title, columns, rows)
    if failed := [each.name for each in entries if any(one["error"] for one in rounds[each])]:
        raise BenchError(f"failed: {', '.join(failed)}")


def figures(rounds: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Each figure's median, minimum and maximum over the rounds that did not fail; empty if all
    failed."""
    found = [each["answer"]["figures"] for each in rounds if each["answer"]]
    values = {name: [each[name] for each in found] for name in _COLUMNS if found}
    return {
        name: {"median": statistics.median(v), "min": min(v), "max": max(v)}
        for name, v in values.items()
    }


def _cells(result: dict[str, Any]) -> list[str]:
    cells = []
    for name, (_, pattern) in _COLUMNS.items():
        if name not in result:
            return ["failed"]
        median, low, high = (pattern.format(result[name][key]) for key in ("median", "min", "max"))
        cells.append(median if low == high else f"{median}\n({low}–{high})")
    return cells


def driver_module(entry: Entry) -> str:
    return f"bench.peers.{entry.peer}"


def run_driver(entry: Entry, job: Job) -> dict[str, Any]:
    """Runs a driver in a new process group, which has ended on return; returns the driver's output.

    Raises:
        BenchError: the driver failed or took too long; its log's last lines say why.
    """
    log = HOME / "logs" / f"{entry.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    command: list[str | Path] = [python(entry.peer), "-m", driver_module(entry)]
    with (
        log.open("wb") as errors,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            cwd=ROOT,
            start_new_session=True,
        ) as process,
    ):
        try:
            output, _ = process.communicate(job.to_json().encode(), TIMEOUT_S)
        except subprocess.TimeoutExpired as timeout:
            raise BenchError(f"{entry.name}: {timeout}") from timeout
        finally:
            with suppress(ProcessLookupError):  # the driver and its descendants have ended
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode != 0:
        last = log.read_text(errors="replace").strip().splitlines()[-_REASON_LINES:]
        raise BenchError("\n".join([f"{entry.name}: see {log}", *last]))
    answer: dict[str, Any] = json.loads(output)
    return answer
