"""`python -m bench.peers`: compares this server with others on one machine, in one run in which
they take turns. See docs/results/peers.md."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.errors import BenchError
from bench.peers.entries import ENTRIES, FILE, FULL, TINY, Entry, Job
from bench.peers.install import HOME, ROOT, converted, is_gguf, python
from bench.peers.report import Comparison, Round
from bench.texts import read_tokens
from deploy.errors import LaunchError
from deploy.model import model_name, resolve_model

TIMEOUT_S = 3600.0
_REASON_LINES = 12


def parse_args(args: list[str]) -> argparse.Namespace:
    names = [entry.name for entry in ENTRIES]
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description=__doc__)
    parser.add_argument("--model", required=True, help="what MODEL takes")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME",
                        help=f"default: {', '.join(names)}")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=3, help="%(default)s")
    parser.add_argument("--tiny", action="store_true", help="a few tokens: does everything run?")
    options = parser.parse_args(args)
    if options.rounds < 1:
        parser.error("--rounds: must be at least 1")
    return options


def compare(comparison: Comparison, model: Path, done: Callable[[Entry, Round], None]) -> None:
    """Runs all entries once per round, and calls `done` after each. A failure is kept as a result.

    Raises:
        BenchError: a server is not installed.
    """
    for entry in comparison.entries:
        python(entry.peer)
    models: dict[Entry, Path | BenchError] = {}
    for entry in comparison.entries:
        try:
            models[entry] = converted(entry, model)
        except BenchError as error:
            models[entry] = error
    text = read_tokens(model).tolist()
    for _ in range(comparison.num_rounds):
        for entry in comparison.entries:
            try:
                if isinstance(converted_to := models[entry], BenchError):
                    raise converted_to
                job = Job(str(converted_to), text, entry, comparison.sizes, time.monotonic())
                outcome = Round(run_driver(entry, job))
            except BenchError as error:
                outcome = Round(None, str(error))
            comparison.rounds[entry].append(outcome)
            done(entry, outcome)


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
            _kill_group(process)
    if process.returncode != 0:
        last = log.read_text(errors="replace").strip().splitlines()[-_REASON_LINES:]
        raise BenchError("\n".join([f"{entry.name}: see {log}", *last]))
    answer: dict[str, Any] = json.loads(output)
    return answer


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):  # the driver and its descendants have ended
        os.killpg(process.pid, signal.SIGKILL)


def main(args: list[str]) -> int:
    options = parse_args(args)
    console = Console()
    try:
        model = resolve_model(options.model).resolve()
    except LaunchError as error:
        print(f"bench.peers: --{error}", file=sys.stderr)
        return 1
    entries: Sequence[Entry] = [entry for entry in ENTRIES if entry.name in options.only]
    if not is_gguf(model):
        entries = [entry for entry in entries if entry.weights != FILE]
    sizes = TINY if options.tiny else FULL
    name = model_name(options.model, model)
    comparison = Comparison(name, entries, sizes, options.rounds)

    def done(entry: Entry, outcome: Round) -> None:
        comparison.write(options.out)
        figures = outcome.answer and outcome.answer["figures"]
        console.print(f"{entry.name}: {figures or outcome.error}", markup=False)

    try:
        compare(comparison, model, done)
    except BenchError as error:
        print(f"bench.peers: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    comparison.print(console)
    console.print(f"written: {options.out}")
    return 1 if comparison.failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
