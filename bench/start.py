"""Measures how long a start takes: `python -m bench.start --model DIR [--runs 5]`.

It starts private stacks one after another, as `make up` does, and prints medians. The times are
seconds from the launcher's start until the stack serves, and until the first token. The CPU seconds
are those of each process up to the first token. On a busy machine, compare the CPU seconds. The
command `python -X importtime -c 'import worker_svc.__main__'` shows the time of each import.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from pathlib import Path
from statistics import median

import psutil

from deploy.first_tokens import stream_completion
from nano_vllm_grpc import PrivateStack


def measure(model: Path) -> dict[str, float]:
    """Starts a stack -> the figures to print.

    Raises:
        StackError: the stack does not start.
    """
    started = time.monotonic()
    with PrivateStack(model) as stack:
        found: dict[str, float] = defaultdict(float)
        found["s, serves"] = time.monotonic() - started
        stream_completion(stack.address, lambda _: None, max_tokens=1)
        found["s, first token"] = time.monotonic() - started
        for process in psutil.Process().children(recursive=True):
            times = process.cpu_times()
            found[f"CPU s, {_name(process)}"] += times.user + times.system
            found["CPU s, all"] += times.user + times.system
    return found


def _name(process: psutil.Process) -> str:
    """The name of the module that a process runs."""
    words = process.cmdline()
    return words[words.index("-m") + 1] if "-m" in words else process.name()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.start")
    parser.add_argument("--model", type=Path, default=Path("models/demo"))
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    runs = [measure(options.model) for _ in range(options.runs)]
    for name in runs[0]:
        print(f"{median(run[name] for run in runs):8.2f} {name}")


if __name__ == "__main__":
    main()
