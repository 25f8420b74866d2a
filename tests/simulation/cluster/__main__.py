"""`python -m tests.simulation.cluster`: some seconds of a large cluster under load, with faults."""

from __future__ import annotations

import argparse
import gc
import logging
import secrets
import time
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import structlog

from tests.simulation import virtual_time
from tests.simulation.cluster.long_run import LongRun


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.cluster")
    parser.add_argument("--seed", type=int, help="random by default")
    args = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    seed = secrets.randbits(32) if args.seed is None else args.seed
    print(f"seed {seed}", flush=True)
    began = time.process_time()
    with TemporaryDirectory(prefix="nano") as directory:
        run = LongRun(Random(seed), Path(directory), engines=32, frontends=4, seconds=10.0)
        gc.disable()  # its pauses would be measured as routing
        figures = virtual_time.run(run.run())
    for name, value in sorted(figures.items()):
        print(f"{name:<44}{value:>12,.6g}")
    print(f"{time.process_time() - began:.0f} s of CPU time")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
