"""Stacks with pipeline stages have the tokens of one worker, also if a rank is killed or hangs."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

from tests.chaos.campaign import undisturbed
from tests.chaos.workload import draw_requests
from tests.faults.streams import assert_undamaged
from tests.faults.transcript import Transcript
from tests.stack import RealStack, running_stack

pytestmark = pytest.mark.timeout(600)

_REQUESTS = draw_requests(Random(2), 18)  # each feature at least once
# So few blocks that sequences are preempted, and prompts come in chunks.
_SMALL: dict[str, Any] = {"kv_blocks": 100, "max_num_batched_tokens": 64, "max_num_seqs": 32}
_LIKE_ALL: dict[str, Any] = {"dtype": "float32", "block_size": 16}
_HANG_S = 5


@pytest.fixture(scope="module")
def expected() -> dict[str, Transcript]:
    """Transcripts of the requests with one worker."""
    with running_stack(**_LIKE_ALL, kv_blocks=1024, speculation="none") as stack:
        return asyncio.run(undisturbed(stack.address, _REQUESTS))


@pytest.fixture(scope="module")
def stack() -> Iterator[RealStack]:
    """A stage with the first layer, one with the next, and one with the last two."""
    with running_stack(pp=3, pp_layers="1,1,2", **_LIKE_ALL, **_SMALL) as started:
        yield started


async def lose(
    stack: RealStack, expected: dict[str, Transcript], rank: int, number: signal.Signals
) -> None:
    """Sends a signal to a rank under load. It must be replaced, and clients get the same tokens."""
    load = await asyncio.to_thread(stack.wait_idle)
    with stack.hold.after(100):
        reading = asyncio.create_task(undisturbed(stack.address, _REQUESTS))
        wanted = load.sampled_tokens + 80
        await asyncio.to_thread(stack.wait_load, lambda now: now.sampled_tokens > wanted)
        pid = await asyncio.to_thread(stack.signal, "worker", rank, number)
    assert_undamaged(await reading, expected)

    await asyncio.to_thread(stack.wait_replaced, "worker", rank, pid)
    await asyncio.to_thread(stack.wait_serving)
    await asyncio.to_thread(stack.wait_idle)


def test_three_stages(stack: RealStack, expected: dict[str, Transcript]) -> None:
    assert_undamaged(asyncio.run(undisturbed(stack.address, _REQUESTS)), expected)
    load = stack.wait_idle()
    assert load.num_stages == 3
    assert load.preemptions > 0
    assert load.draft_tokens == 0


@pytest.mark.parametrize("rank", range(3))
async def test_a_stage_is_lost(
    stack: RealStack, expected: dict[str, Transcript], rank: int
) -> None:
    """The others keep their processes, and all keep the cache."""
    lost_tokens = stack.load().lost_tokens
    others = {key: pid for key, pid in stack.pids().items() if key != ("worker", rank)}
    await lose(stack, expected, rank, signal.SIGKILL)
    assert {key: stack.pid(*key) for key in others} == others
    assert stack.load().lost_tokens == lost_tokens


async def test_a_stage_hangs(expected: dict[str, Transcript]) -> None:
    hangs = {"NANO_HANG_TIMEOUT_S": f"{_HANG_S}"}
    with running_stack(hangs, pp=2, **_LIKE_ALL, kv_blocks=400) as two:
        await lose(two, expected, 1, signal.SIGSTOP)


async def test_two_stages_of_two_ranks(expected: dict[str, Transcript]) -> None:
    with running_stack(tp=2, pp=2, frontends=2, **_LIKE_ALL, kv_blocks=400) as four:
        await lose(four, expected, 3, signal.SIGKILL)
