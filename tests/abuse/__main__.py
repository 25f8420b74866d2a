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
    parser.add_argument("--seconds", type=float, default=1.5, help="of each window")
    parser.add_argument("--rounds", type=int, default=3, help="of each attack")
    parser.add_argument(
        "--check",
        type=float,
        metavar="FACTOR",
        help="fail if an honest p99 gap grows by more, against the control",
    )
    parser.add_argument("--out", type=Path, help="write the report to a JSON file")
    parser.add_argument("--list", action="store_true", help="print the attacks, play none")
    args = parser.parse_args()
    if args.list:
        for attack in ATTACKS.values():
            print(f"{attack.name:20} {attack.about}")
        return 0
    if _AUTOGROUP.exists() and _AUTOGROUP.read_text().strip() == "1":
        print(f"{_AUTOGROUP} is 1: a busy stack keeps other sessions waiting, honest clients too")
    chosen = [ATTACKS[name] for name in args.attack or ATTACKS]
    with tqdm(total=len(chosen), unit="attack") as progress:

        def on_attack(name: str) -> None:
            progress.set_postfix_str(name)
            progress.update()

        report = run_campaign(
            chosen,
            args.seconds,
            args.rounds,
            report_attack=on_attack,
            out=args.out,
        )
    Console(width=_WIDTH).print(report.render(args.check))
    return 1 if report.failures(args.check) else 0


if __name__ == "__main__":
    raise SystemExit(main())
