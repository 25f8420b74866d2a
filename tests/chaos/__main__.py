"""`python -m tests.chaos --faults N --seed S` runs half of the faults at TP 1, half at TP 2.

Other models and options measure pauses: `--model DIR --tp 1 --clients 4 --kind "worker killed"`.
"""

from __future__ import annotations

import argparse
import secrets
import time
from pathlib import Path

from rich.console import Console
from tqdm import tqdm

from tests.chaos.campaign import CLIENTS, run_campaign
from tests.chaos.faults import FAULTS
from tests.chaos.report import Report


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos", epilog="Other options, such as --model, are those of `run`."
    )
    parser.add_argument("--faults", type=int, default=200, help="number of faults")
    parser.add_argument("--seed", type=int, help="random by default")
    parser.add_argument("--out", type=Path, help="write the report to a JSON file")
    parser.add_argument("--tp", type=int, nargs="+", default=[1, 2], help="default: 1 2")
    parser.add_argument("--clients", type=int, default=CLIENTS)
    parser.add_argument("--kind", nargs="+", choices=FAULTS, default=[], help="default: all")
    args, others = parser.parse_known_args()
    pairs = zip(others[::2], others[1::2], strict=True)
    variables = {name.removeprefix("--").replace("-", "_"): value for name, value in pairs}
    seed = secrets.randbits(32) if args.seed is None else args.seed
    print(f"seed {seed}", flush=True)
    report, started = Report(seed), time.monotonic()
    with tqdm(total=args.faults, unit="fault") as progress:

        def on_fault(kind: str) -> None:
            progress.set_postfix_str(kind)
            progress.update()

        for number, tp in enumerate(args.tp):
            if faults := (args.faults + number) // len(args.tp):
                how = {"kinds": args.kind, "clients": args.clients, **variables}
                report.add(run_campaign(seed, faults, tp, on_fault, **how))
    report.seconds = time.monotonic() - started
    Console().print(report.render())
    if args.out is not None:
        report.save(args.out)
    return 0 if report.ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
