"""`python -m tests.abuse` plays every attack on a stack of its own, beside 16 honest streams."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console
from tqdm import tqdm

from tests.abuse.attacks import ATTACKS
from tests.abuse.campaign import run_campaign

_WIDTH = 210  # of the table, in columns
_AUTOGROUP = Path("/proc/sys/kernel/sched_autogroup_enabled")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.abuse")
    parser.add_argument("--attack", nargs="+", choices=[*ATTACKS], help="all by default")
    parser.add_argument(
        "--check",
        type=float,
        metavar="FACTOR",
        help="fail if an honest p99 gap grows by more, against the control",
    )
    parser.add_argument("--out", type=Path, help="write the report to a JSON file")
    args = parser.parse_args()
    if _AUTOGROUP.exists() and _AUTOGROUP.read_text().strip() == "1":
        print(f"{_AUTOGROUP} is 1: a busy stack keeps other sessions waiting, honest clients too")
    chosen = [ATTACKS[name] for name in args.attack or ATTACKS]
    with tqdm(total=len(chosen), unit="attack") as progress:

        def on_attack(name: str) -> None:
            progress.set_postfix_str(name)
            progress.update()

        report = run_campaign(chosen, on_attack, args.out)
    Console(width=_WIDTH).print(report.render(args.check))
    return 1 if report.failures(args.check) else 0


if __name__ == "__main__":
    raise SystemExit(main())
