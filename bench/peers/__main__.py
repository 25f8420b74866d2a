"""`python -m bench.peers`: compares this server with others on one machine, in one run in which
they take turns. See docs/results/peers.md."""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.machine import Machine, this_machine
from bench.peers.driver import ENTRIES, FILE, FULL, TINY, Entry, Job, Sizes
from bench.peers.installed import HOME, ROOT, converted, is_gguf, python
from bench.report import print_table
from bench.workload import TEMPERATURE, BenchError, read_tokens
from deploy.errors import LaunchError
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


@dataclass(frozen=True)
class Round:
    """An entry's result in a round: the output of its driver, or the reason for its failure."""

    answer: dict[str, Any] | None
    error: str | None = None


@dataclass
class Comparison:
    model: str
    entries: Sequence[Entry]
    sizes: Sizes
    num_rounds: int
    rounds: dict[Entry, list[Round]] = field(init=False)
    machine: Machine = field(default_factory=this_machine)

    def __post_init__(self) -> None:
        self.rounds = {entry: [] for entry in self.entries}

    @property
    def failed(self) -> bool:
        return any(each.error for rounds in self.rounds.values() for each in rounds)

    def figures(self, entry: Entry) -> dict[str, dict[str, float]]:
        """Each figure's median, minimum and maximum over the rounds that did not fail; empty if all
        failed."""
        found = [each.answer["figures"] for each in self.rounds[entry] if each.answer]
        values = {name: [each[name] for each in found] for name in _COLUMNS if found}
        return {
            name: {"median": statistics.median(v), "min": min(v), "max": max(v)}
            for name, v in values.items()
        }

    def write(self, path: Path) -> None:
        content = {
            "mode": "peers",
            "model": self.model,
            "workload": {**asdict(self.sizes), "temperature": TEMPERATURE},
            "entries": [
                {
                    **asdict(entry),
                    **self.figures(entry),
                    "rounds": [asdict(each) for each in self.rounds[entry]],
                }
                for entry in self.entries
            ],
            **asdict(self.machine),
        }
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    def print(self, console: Console) -> None:
        rows = []
        for entry in self.entries:
            found = self.figures(entry)
            cells = [show(found[name], pattern) for name, (_, pattern) in _COLUMNS.items() if found]
            rows.append([entry.name, entry.cache, *(cells or ["failed"])])
        title = f"{self.model}: medians of {self.num_rounds} (min–max)"
        columns = ["", "cache", *(label for label, _ in _COLUMNS.values())]
        print_table(console, title, columns, rows)


def show(figure: dict[str, float], pattern: str) -> str:
    median, low, high = (pattern.format(figure[name]) for name in ("median", "min", "max"))
    return median if low == high else f"{median}\n({low}–{high})"


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
    text = read_tokens(model)
    for _ in range(comparison.num_rounds):
        for entry in comparison.entries:
            try:
                job = Job(
                    str(converted(entry, model)), text, entry, comparison.sizes, time.monotonic()
                )
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
