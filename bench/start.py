"""Shows where the time goes from `make up` to a first token.

    python -m bench.start --model DIR [--runs 5]

Starts private stacks one after another, as `make up` does. Prints medians: when each process
started, forked (its imports are done), and what it logged, in seconds since the launcher's start;
and the CPU seconds that each had used when the first token came. On a busy machine compare those.
Which imports they went to: `python -X importtime -c 'import worker_svc.__main__'`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import psutil

from bench.errors import BenchError
from deploy.first_tokens import stream_completion
from deploy.native.processes import MARKER
from shared.config import PREFIX

MODULES = ("deploy.native.supervisor", "worker_svc", "scheduler_svc", "frontend")
STOP_TIMEOUT_S = 30.0

Times = dict[str, float]


@contextmanager
def private_stack(model: Path) -> Iterator[tuple[psutil.Popen, str]]:
    """Runs the launcher -> its process and the public address, once the stack serves.

    Raises:
        BenchError: the stack does not start.
    """
    launcher = psutil.Popen(
        [sys.executable, "-P", "-m", "cli", "run", "--port", "0", "--model", str(model)],
        env={**os.environ, PREFIX + "LOG_FORMAT": "json"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        word, _, address = launcher.stdout.readline().decode().strip().partition(" ")
        if word != "READY":
            raise BenchError("the stack did not start")
        yield launcher, address
    finally:
        launcher.stdin.close()
        launcher.wait(STOP_TIMEOUT_S)
        launcher.stdout.close()


def measure(model: Path) -> tuple[Times, Times]:
    """Starts a stack -> the time of each event, and the CPU seconds of each process, until the
    first token."""
    started = datetime.now(UTC)
    first: list[datetime] = []
    with private_stack(model) as (launcher, address):
        ready = datetime.now(UTC)
        stream_completion(address, lambda _: first.append(datetime.now(UTC)), max_tokens=1)
        events = {
            "READY": (ready - started).total_seconds(),
            "first token": (first[0] - started).total_seconds(),
        }
        cpu = {"launcher": _cpu_s(launcher)}
        for process in launcher.children(recursive=True):
            name = _name(process)
            # Clock ticks since boot, of both: to better than the time of the boot is known.
            event = f"{name}: starts"
            if name in cpu:
                name, event = f"{name}, its fork", f"{name}: imported, forks"
            cpu[name] = _cpu_s(process)
            events[event] = process.create_time() - launcher.create_time()
        for event, at in _logged(Path(launcher.children()[0].environ()[MARKER])):
            events.setdefault(event, (at - started).total_seconds())
    return events, cpu


def _cpu_s(process: psutil.Process) -> float:
    """CPU time of the process alone, while `bench.machine.cpu_s` is a service's, with its forks."""
    times = process.cpu_times()
    return float(times.user + times.system)


def _name(process: psutil.Process) -> str:
    command = process.cmdline()
    module = next(each for each in MODULES if each in command)
    rank = command[command.index("--rank") + 1] if "--rank" in command else ""
    return f"{module} {rank}".strip()


def _logged(directory: Path) -> Iterator[tuple[str, datetime]]:
    for path in directory.glob("*-*.log"):
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith("{"):
                entry = json.loads(line)
                at = datetime.fromisoformat(entry["timestamp"])
                yield f"{entry['service']}: {entry['event']}", at


def _print_medians(title: str, runs: list[Times]) -> None:
    values: dict[str, list[float]] = defaultdict(list)
    for run in runs:
        for name, value in run.items():
            values[name].append(value)
    print(f"\n{title}")
    for name, each in sorted(values.items(), key=lambda item: median(item[1])):
        print(f"{median(each):8.2f}  {name}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.start")
    parser.add_argument("--model", type=Path, default=Path("models/demo"))
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    measured = [measure(options.model) for _ in range(options.runs)]
    _print_medians("seconds since the launcher's start", [events for events, _ in measured])
    _print_medians("CPU seconds until the first token", [cpu for _, cpu in measured])
    print(f"{median(sum(cpu.values()) for _, cpu in measured):8.2f}  all")


if __name__ == "__main__":
    main()
