"""A few hostile messages to each service, the same each time; `python -m tests.fuzz` sends more,
and others."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from tests.fuzz.run import SERVICES

MESSAGES = {
    "frontend": 100,
    "engine": 60,
    "scheduler": 100,
    "worker": 100,
    "processes": 40,
    "http": 40,
}


@pytest.mark.parametrize("service", SERVICES)
async def test_nothing_that_is_sent_does_harm(service: str) -> None:
    with tempfile.TemporaryDirectory(prefix="nano") as directory:  # short: sockets allow 107 bytes
        tally = await SERVICES[service](Path(directory), MESSAGES[service], 1)
    assert not tally.problems, "\n".join(tally.problems)
    assert tally.counts["INVALID_ARGUMENT"] or tally.counts["400"]
    assert tally.counts["OK"] or tally.counts["200"]
