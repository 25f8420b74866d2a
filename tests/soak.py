"""`python -m tests.soak`: all random tests, with new seeds, for hours.

A list of commands, which run one after another. Each one's result goes to a JSON file as soon as it
ends: the same command line continues where it was stopped. The exit status is 0 only if every
command's was.
"""

from __future__ import annotations

import argparse
import json
import secrets
import shlex
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.machine import this_machine
from tests.stack import ROOT

_SEED = "SEED"  # a word of a command that becomes a random number


def _commands() -> dict[str, tuple[str, ...]]:
    """Modules to run with their arguments, by name."""
    worlds = ("engine", "cluster", "successions", "prefix-index", "state-machines")
    chaos = ("tests.chaos", "--faults", "200", "--seed", _SEED)
    return {
        **{
            f"simulation: {world}": ("tests.simulation", "--of", world, "--seed", _SEED)
            for world in worlds
        },
        "planted bugs": ("tests.simulation.mutations",),
        "hostile messages": ("pytest", "-q", "-m", "soak", "--seed=random", "tests/fuzz"),
        "attacks": ("tests.abuse", "--check", "2"),
        "chaos": chaos,
        "chaos, two engines": (*chaos, "--engines", "2", "--tp", "1"),
        "random cases": (
            *("pytest", "-q", "--seed=random", "--count=100"),
            *("tests/shared", "tests/scheduler_svc"),
        ),
        "tests marked soak": ("pytest", "-q", "-m", "soak", "--ignore=tests/fuzz"),
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak")
    parser.add_argument("--out", type=Path, default=ROOT / ".run" / "soak.json")
    parser.add_argument("--only", default="", help="runs whose name contains this")
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    runs: list[Any] = json.loads(args.out.read_text())["runs"] if args.out.exists() else []
    known = {run["name"] for run in runs}
    for name, words in _commands().items():
        if name not in known and args.only in name:
            print(name, flush=True)
            runs.append({"name": name, **_run(words, args.out.with_suffix(".log"))})
            machine = this_machine()
            report = {"machine": machine.machine, "versions": machine.versions, "runs": runs}
            args.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    for run in runs:
        print(f"{run['exit_status']}  {run['seconds'] / 60:6.1f} min  {run['name']}")
    return int(any(run["exit_status"] for run in runs))


def _run(words: tuple[str, ...], log: Path) -> dict[str, object]:
    """Runs a module, and adds its output to `log`. Returns the result."""
    words = tuple(str(secrets.randbits(32)) if word == _SEED else word for word in words)
    command, started = [sys.executable, "-m", *words], time.monotonic()
    with log.open("ab") as output:
        output.write(f"$ {shlex.join(command)}\n".encode())
        output.flush()
        status = subprocess.call(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
    return {
        "command": shlex.join(command),
        "exit_status": status,
        "seconds": round(time.monotonic() - started, 1),
        "last_line": log.read_text(errors="replace").splitlines()[-1].strip(),
        "commit": this_machine().commit,
        "ended": datetime.now(UTC).isoformat(timespec="seconds"),
    }


if __name__ == "__main__":
    raise SystemExit(main())
