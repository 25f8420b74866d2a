"""`python -m tests.chaos --faults N --seed S` runs half of the faults at TP 1, half at TP 2."""

from __future__ import annotations

import argparse
import secrets
import time
from pathlib import Path

from rich.console import Console
from tqdm import tqdm

from tests.chaos.campaign import run_campaign
from tests.chaos.report import Report

_RANKS = (1, 2)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos")
    parser.add_argument("--faults", type=int, default=200, help="number of faults")
    parser.add_argument("--seed", type=int, help="random by default")
    parser.add_argument("--out", type=Path, help="write the report to a JSON file")
    args = parser.parse_args()
    seed = secrets.randbits(32) if args.seed is None else args.seed
    print(f"seed {seed}", flush=True)
    report, started = Report(seed), time.monotonic()
    with tqdm(total=args.faults, unit="fault") as progress:

        def on_fault(kind: str) -> None:
            progress.set_postfix_str(kind)
            progress.update()

        for number, tp in enumerate(_RANKS):
            faults = (args.faults + number) // len(_RANKS)
            if faults:
                report.add(run_campaign(seed, faults, tp, on_fault))
    report.seconds = time.monotonic() - started
    Console().print(report.render())
    if args.out is not None:
        report.save(args.out)
    return 0 if report.ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
