"""A process that plays one attack."""

from __future__ import annotations

import asyncio
import os
import resource
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

from tests.abuse.attack import Gains, Target
from tests.abuse.attacks import ATTACKS


@dataclass(frozen=True)
class Played:
    """The result of an attack: what it received and sent, and the CPU that it used."""

    gains: Gains
    cpu_s: float
    seconds: float


def attack(pipe: Connection, name: str, address: str, token: str, seconds: float) -> None:
    """Sends a message once the attack is prepared, begins when it receives one, and ends with
    `Played`."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    pipe.send(asyncio.run(_play(pipe, name, address, token, seconds)))
    os._exit(0)  # closing thousands of connections takes long


async def _play(pipe: Connection, name: str, address: str, token: str, seconds: float) -> Played:
    began_at, cpu_s = 0.0, 0.0

    async def ready() -> None:
        nonlocal began_at, cpu_s
        pipe.send("ready")
        await asyncio.to_thread(pipe.recv)
        began_at, cpu_s = time.monotonic(), time.process_time()

    target = Target(address, token, seconds, ready)
    await ATTACKS[name].play(target)
    return Played(target.gains, time.process_time() - cpu_s, time.monotonic() - began_at)
