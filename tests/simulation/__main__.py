"""`python -m tests.simulation --seeds N --seed FIRST`: simulates seeds FIRST, FIRST + 1, ..."""

from __future__ import annotations

import argparse
import os
import secrets
import time

from tests.simulation.run_seeds import run_seeds


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation")
    parser.add_argument("--seeds", type=int, default=1000, help="number of seeds")
    parser.add_argument("--seed", type=int, help="the first seed; random by default")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    args = parser.parse_args()
    first = secrets.randbits(32) if args.seed is None else args.seed
    print(f"seeds {first} to {first + args.seeds - 1}", flush=True)
    started = time.monotonic()
    summary = run_seeds(range(first, first + args.seeds), args.processes, progress=True)
    for name, count in sorted(summary.counts.items()):
        print(f"  {name:<24}{count:>12,}")
    print(f"{args.seeds} seeds in {time.monotonic() - started:.0f} s, {len(summary.failures)} fail")
    if summary.failures:
        print(f"\n{summary.failures[0]}")
    return 1 if summary.failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
