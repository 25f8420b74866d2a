"""Fuzzes a service at each of its interfaces, one after another."""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.fuzz.harness import fuzz
from tests.fuzz.scheduler import running_scheduler
from tests.fuzz.stack import running_frontend
from tests.fuzz.tally import Tally
from tests.fuzz.worker import running_worker

# Each starts a service, with sockets in a directory, and yields its interfaces.
SERVICES = {
    "frontend": running_frontend,
    "scheduler": running_scheduler,
    "worker": running_worker,
}


async def fuzz_service(service: str, count: int, seed: int) -> dict[str, Tally]:
    """Sends `count` messages to each interface; returns the tallies by interface."""
    # Its path is short: sockets allow 107 bytes.
    with tempfile.TemporaryDirectory(prefix="nano") as directory:
        async with SERVICES[service](Path(directory)) as interfaces:
            return {each.corpus: await fuzz(each, count, seed) for each in interfaces}
