"""`python -m tests.simulation --seeds N --seed FIRST`: simulates seeds FIRST, FIRST + 1, ...

Prints the seeds, and the command that repeats a failure. Exits with 1 if a seed fails.
"""

from __future__ import annotations

import argparse
import os
import secrets
import time

from tests.simulation.run_seeds import WORLDS, run_seeds


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation")
    parser.add_argument("--seeds", type=int, default=1000, help="number of seeds of each world")
    parser.add_argument("--seed", type=int, help="the first seed; random by default")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--of", action="append", choices=WORLDS, help="all by default")
    parser.add_argument("-x", action="store_true", help="stop at the first seed that fails")
    args = parser.parse_args()
    first = secrets.randbits(32) if args.seed is None else args.seed
    seeds = range(first, first + args.seeds)
    return max([_run(world, seeds, args.processes, args.x) for world in args.of or WORLDS])


def _run(world: str, seeds: range, processes: int, to_first_failure: bool) -> int:
    print(f"{world}: seeds {seeds.start} to {seeds.stop - 1}", flush=True)
    started = time.monotonic()
    summary = run_seeds(world, seeds, processes, to_first_failure=to_first_failure, progress=True)
    for name, count in sorted(summary.counts.items()):
        print(f"  {name:<44}{count:>12,}")
    took_s, failures = time.monotonic() - started, len(summary.failures)
    print(f"{summary.num_seeds} seeds in {took_s:.0f} s, {failures} fail")
    if summary.failures:
        print(f"\n{summary.failures[0]}", flush=True)
    return 1 if summary.failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
