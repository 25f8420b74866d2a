"""`python -m tests.abuse.attacker NAME`: a process that plays one attack.

It says READY once the attack is prepared, begins on a line of input, and ends with a line of JSON:
what it got, what it sent, and the CPU it used in the meantime.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import sys
import time

from tests.abuse.attack import Target
from tests.abuse.attacks import ATTACKS


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.abuse.attacker")
    parser.add_argument("name", choices=[*ATTACKS])
    parser.add_argument("--address", required=True)
    parser.add_argument("--token", default="")
    parser.add_argument("--seconds", type=float, required=True)
    options = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    print(json.dumps(asyncio.run(_play(options))), flush=True)
    os._exit(0)  # no farewell to thousands of connections: their attacker is gone


async def _play(options: argparse.Namespace) -> dict[str, object]:
    began_at, cpu_s = 0.0, 0.0

    async def ready() -> None:
        nonlocal began_at, cpu_s
        print("READY", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        began_at, cpu_s = time.monotonic(), time.process_time()

    target = Target(options.address, options.token, options.seconds, ready)
    await ATTACKS[options.name].play(target)
    loot = target.loot
    return {
        "answers": loot.answers,
        "sent": loot.sent,
        "tokens": loot.tokens,
        "cpu_s": time.process_time() - cpu_s,
        "seconds": time.monotonic() - began_at,
    }


if __name__ == "__main__":
    main()
