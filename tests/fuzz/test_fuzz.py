"""A few hostile messages to each service, the same each time; `python -m tests.fuzz` sends more,
and others."""

from __future__ import annotations

import pytest

from tests.fuzz.run import SERVICES, fuzz_service

_MESSAGES = 60  # to each interface of a service


@pytest.mark.parametrize("service", SERVICES)
async def test_nothing_that_is_sent_does_harm(service: str) -> None:
    for interface, tally in (await fuzz_service(service, _MESSAGES, 1)).items():
        assert not tally.problems, "\n".join(tally.problems)
        assert tally.counts["OK"] or tally.counts["200"], interface
        if interface != "transport":
            assert tally.counts["INVALID_ARGUMENT"] or tally.counts["400"], interface
