"""`python -m bench --mode MODE`: measures a part of the server, or the whole of it.

Each mode is a module with `parse_args(args)` and `measure(options, console)`. The latter yields the
mode's figures so far, each time for the whole JSON file. See docs/results/index.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from datetime import UTC, datetime
from importlib import import_module

from grpc.aio import AioRpcError
from rich.console import Console

from bench.machine import this_machine
from bench.report import MODES
from bench.workload import BenchError
from deploy.errors import LaunchError
from nano_vllm_grpc import LLMError
from shared.config import SettingsError
from worker_svc.errors import StartError

_FAILURES = (
    BenchError,
    LaunchError,
    LLMError,
    OSError,
    SettingsError,
    StartError,
    UnicodeDecodeError,
)


def main(args: list[str]) -> int:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--mode", choices=MODES, default="stack")
    chosen, _ = parser.parse_known_args(args)
    # The mode is imported on demand, because each mode needs different services.
    mode = import_module(MODES[chosen.mode])
    options = mode.parse_args(args)
    console = Console()
    about = {
        "mode": chosen.mode,
        "date": datetime.now(UTC).date().isoformat(),
        "command": ["python", "-m", "bench", *args],
        **dataclasses.asdict(this_machine()),
    }
    try:
        for found in mode.measure(options, console):
            text = json.dumps(about | found, indent=2)
            options.out.write_text(text + "\n", encoding="utf-8")
    except _FAILURES as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    except AioRpcError as error:
        print(f"bench: {error.code().name}: {error.details()}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    console.print(f"written: {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
