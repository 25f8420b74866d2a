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
from tests.stack import DEMO_MODEL


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos")
    parser.add_argument("--faults", type=int, default=200, help="number of faults")
    parser.add_argument("--seed", type=int, help="random by default")
    parser.add_argument("--out", type=Path, help="write the report to a JSON file")
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--model", type=Path, default=DEMO_MODEL, help="its directory")
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--speculation", default="auto")
    parser.add_argument("--draft-quantization", default="auto")
    parser.add_argument("--tp", type=int, nargs="+", default=[1, 2], help="default: 1 2")
    parser.add_argument("--clients", type=int, default=CLIENTS)
    parser.add_argument("--kind", nargs="+", choices=FAULTS, default=[], help="default: all")
    args = parser.parse_args()
    seed = secrets.randbits(32) if args.seed is None else args.seed
    print(f"seed {seed}", flush=True)
    report, started = Report(seed), time.monotonic()
    with tqdm(total=args.faults, unit="fault") as progress:

        def on_fault(kind: str) -> None:
            progress.set_postfix_str(kind)
            progress.update()

        for number, tp in enumerate(args.tp):
            faults = (args.faults + number) // len(args.tp)
            if faults:
                report.add(
                    run_campaign(
                        seed,
                        faults,
                        tp,
                        on_fault,
                        kinds=args.kind,
                        clients=args.clients,
                        engines=args.engines,
                        model=args.model,
                        quantization=args.quantization,
                        speculation=args.speculation,
                        draft_quantization=args.draft_quantization,
                    )
                )
    report.seconds = time.monotonic() - started
    Console().print(report.render())
    if args.out is not None:
        report.save(args.out)
    return 0 if report.ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
