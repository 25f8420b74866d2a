"""`python -m bench`: measures a running server or a private stack.

With `--mode` it measures the scheduler or the frontend alone, latency against load, or the cost of
the HTTP gateway. See docs/results/cpu.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from importlib import import_module

from grpc.aio import AioRpcError
from rich.console import Console

from bench.machine import this_machine
from bench.report import MODES
from bench.workload import BenchError
from nano_vllm_grpc import LLMError


def main(args: list[str]) -> int:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--mode", choices=MODES, default="stack")
    chosen, _ = parser.parse_known_args(args)
    # The mode is imported on demand, because each mode needs different services.
    mode = import_module(f"bench.{chosen.mode}_mode")
    options = mode.parse_args(args)
    console = Console()
    try:
        found = mode.measure(options, console)
    except (BenchError, LLMError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    except AioRpcError as error:
        print(f"bench: {error.code().name}: {error.details()}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    result = {"mode": chosen.mode, **found, **dataclasses.asdict(this_machine())}
    options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    console.print(f"written: {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
