"""One real stack with two ranks and two frontends: whichever service loses a process under load,
clients of the library get the tokens that they would have got anyway. tests/faults has the other
faults."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from random import Random

import pytest

from tests.chaos.campaign import undisturbed
from tests.chaos.workload import draw_requests
from tests.faults.streams import assert_undamaged
from tests.faults.transcript import Transcript
from tests.stack import RealStack, running_stack

pytestmark = pytest.mark.timeout(600)

_REQUESTS = draw_requests(Random(1), 22)  # two of each feature
_TOKENS = 100  # of all streams, before the kill
_STEPS = 150  # at most until then: some sample nothing but a token after the end of a request


@pytest.fixture(scope="module")
def stack() -> Iterator[RealStack]:
    with running_stack(
        tp=2, frontends=2, dtype="float32", kv_blocks=1024, block_size=16
    ) as running:
        yield running


@pytest.fixture(scope="module")
def expected(stack: RealStack) -> dict[str, Transcript]:
    """Transcripts of the requests if nothing is killed."""
    return asyncio.run(undisturbed(stack.address, _REQUESTS))


@pytest.mark.parametrize(
    ("service", "index"),
    [("worker", 1), ("scheduler", 0), ("frontend", 0), ("frontend", 1)],
)
async def test_killed_under_load(
    stack: RealStack, expected: dict[str, Transcript], service: str, index: int
) -> None:
    load = await asyncio.to_thread(stack.wait_idle)
    others = {key: pid for key, pid in stack.pids().items() if key != (service, index)}
    with stack.hold.after(_STEPS):
        reading = asyncio.create_task(undisturbed(stack.address, _REQUESTS))
        wanted = load.sampled_tokens + _TOKENS
        await asyncio.to_thread(stack.wait_load, lambda now: now.sampled_tokens > wanted)
        pid = await asyncio.to_thread(stack.kill, service, index)
    assert_undamaged(await reading, expected)

    await asyncio.to_thread(stack.wait_replaced, service, index, pid)
    await asyncio.to_thread(stack.wait_serving)
    await asyncio.to_thread(stack.wait_idle)
    assert {key: stack.pid(*key) for key in others} == others
