"""Hostile messages to each interface of each service: a few of them always, and thousands, with
another seed each time, in `make soak`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from tests.fuzz.corpus import save_case
from tests.fuzz.harness import Interface, fuzz
from tests.fuzz.scheduler import running_scheduler
from tests.fuzz.stack import running_frontend
from tests.fuzz.worker import running_worker

MANY = pytest.param(10_000, marks=[pytest.mark.soak, pytest.mark.timeout(7200)])
Running = Callable[[Path], AbstractAsyncContextManager[list[Interface]]]


@pytest.mark.parametrize("count", [60, MANY])  # messages to each interface
@pytest.mark.parametrize("running", [running_frontend, running_scheduler, running_worker])
async def test_nothing_that_is_sent_does_harm(running: Running, count: int, seed: int) -> None:
    # Its path is short: sockets allow 107 bytes.
    with tempfile.TemporaryDirectory(prefix="nano") as directory:
        async with running(Path(directory)) as interfaces:
            tallies = {each.corpus: await fuzz(each, count, seed) for each in interfaces}
    for interface, tally in tallies.items():
        print(f"{interface}: {tally.summary()}")
        for what, case in tally.harmful:
            print(f"kept in {save_case(interface, case, what)}")
    for interface, tally in tallies.items():
        assert not tally.problems, "\n".join(tally.problems)
        assert tally.counts["OK"] or tally.counts["200"], interface
        if interface != "transport":
            assert tally.counts["INVALID_ARGUMENT"] or tally.counts["400"], interface
