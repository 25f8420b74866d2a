"""`python -m tests.fuzz --messages N --seed S [service]` sends each service N hostile messages.

Prints the seed. Exits with 1 if something did harm."""

from __future__ import annotations

import argparse
import asyncio
import secrets
import time
from collections.abc import Sequence

import structlog

from frontend.event_loop import EventLoop
from tests.fuzz.corpus import save_case
from tests.fuzz.run import SERVICES, fuzz_service


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("--messages", type=int, default=10_000, help="messages to each service")
    parser.add_argument("--seed", type=int, help="random by default")
    parser.add_argument("service", nargs="?", choices=[*SERVICES], help="all by default")
    args = parser.parse_args()
    seed = secrets.randbits(32) if args.seed is None else args.seed
    print(f"seed {seed}", flush=True)
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    with asyncio.Runner(loop_factory=EventLoop) as runner:
        return runner.run(
            _fuzz([args.service] if args.service else [*SERVICES], args.messages, seed)
        )


async def _fuzz(services: Sequence[str], count: int, seed: int) -> int:
    num_problems = 0
    for service in services:
        started = time.monotonic()
        tallies = await fuzz_service(service, count, seed)
        print(f"{service}: {time.monotonic() - started:.0f} s")
        for corpus, tally in tallies.items():
            print(f"  {corpus}: {tally.summary()}", flush=True)
            for problem in tally.problems:
                print(f"  {problem}")
            for what, case in tally.harmful:
                print(f"  kept in {save_case(corpus, case, what)}")
            num_problems += len(tally.problems)
    print(f"{num_problems} problems")
    return 1 if num_problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
