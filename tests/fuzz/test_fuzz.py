"""Some hostile messages to each service; `python -m tests.fuzz` sends any number."""

from __future__ import annotations

import secrets
import tempfile
from pathlib import Path

import pytest

from tests.fuzz.run import SERVICES, fuzz_service

MESSAGES = {
    "frontend": 150,
    "engine": 100,
    "scheduler": 200,
    "worker": 200,
    "processes": 80,
    "http": 40,
    "page": 100,
}


@pytest.mark.parametrize("service", SERVICES)
async def test_nothing_that_is_sent_does_harm(service: str) -> None:
    seed = secrets.randbits(32)
    print(f"python -m tests.fuzz --messages {MESSAGES[service]} --seed {seed} {service}")
    with tempfile.TemporaryDirectory(prefix="nano") as directory:  # short: sockets allow 107 bytes
        tally = await fuzz_service(service, Path(directory), MESSAGES[service], seed)
    assert not tally.problems, "\n".join(tally.problems)
    assert tally.counts["INVALID_ARGUMENT"] or tally.counts["400"]
    assert tally.counts["OK"] or tally.counts["200"]
