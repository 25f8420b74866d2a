"""A few hostile messages to each service, the same each time; `python -m tests.fuzz` sends more,
and others."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from tests.fuzz.run import SERVICES

_MESSAGES = 60  # to each interface of a service


@pytest.mark.parametrize("service", SERVICES)
async def test_nothing_that_is_sent_does_harm(service: str) -> None:
    with tempfile.TemporaryDirectory(prefix="nano") as directory:  # short: sockets allow 107 bytes
        tallies = await SERVICES[service](Path(directory), _MESSAGES, 1)
    for tally in tallies.values():
        assert not tally.problems, "\n".join(tally.problems)
        assert tally.counts["INVALID_ARGUMENT"] or tally.counts["400"]
        assert tally.counts["OK"] or tally.counts["200"]
