"""Promises 3 and 7: clients that do not read, vanish or cancel cost little and leave nothing.
Nor does a frontend that is killed."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial

import psutil
import pytest
from grpc import aio

from nano_vllm_grpc import AsyncLLM, SamplingParams
from nano_vllm_grpc.pb.frontend_pb2_grpc import InferenceServiceStub
from nano_vllm_grpc.wire import encode_request
from shared.pb.scheduler_pb2 import GetLoadResponse
from tests.stack import ROOT, RealStack, running_stack
from tests.waiting import WAIT_S

# Less than the clients of a round would leave behind, if it were kept. An allocator may hold on to
# more than that, but not in every round.
_GROWTH = 1 << 20
_ROUNDS = 8
# Over all stalled streams, at some 400 bytes each: more than can be in transit at a time.
_UNREAD_TOKENS = 8 * 250

# Opens streams of wide chunks and reads only one chunk of each.
_STALLED_CLIENT = """
import asyncio, sys
from grpc import aio
from nano_vllm_grpc import SamplingParams
from nano_vllm_grpc.wire import encode_request
from nano_vllm_grpc.pb.frontend_pb2_grpc import InferenceServiceStub

async def main():
    params = SamplingParams(temperature=1, max_tokens=600, ignore_eos=True, logprobs=20)
    request = encode_request("Once", params)
    async with aio.insecure_channel(sys.argv[1]) as channel:
        stub = InferenceServiceStub(channel)
        calls = [stub.GenerateStream(request) for _ in range(8)]
        for call in calls:
            await call.read()
        print("STALLED", flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def stack() -> Iterator[RealStack]:
    # All garbage goes soon, so that only what is kept is seen to grow.
    environment = {"USUAL_GARBAGE": "1"}
    limits = {"max_requests_per_client": 1000}
    with running_stack(environment, kv_blocks=4096, block_size=16, **limits) as running:
        yield running


def memory(stack: RealStack) -> dict[tuple[str, int], int]:
    """The resident bytes of each process that knows of requests, by service and index."""
    pids = {key: pid for key, pid in stack.pids().items() if key[0] != "worker"}
    return {key: psutil.Process(pid).memory_info().rss for key, pid in pids.items()}


def assert_growth_ends(stack: RealStack, play: Callable[[RealStack], None]) -> None:
    """Plays rounds until each process has not grown in one of them."""
    play(stack)
    before, growing = memory(stack), set(memory(stack))
    for _ in range(_ROUNDS):
        play(stack)
        after = memory(stack)
        print(f"growth in bytes: { {key: after[key] - before[key] for key in after} }")
        growing = {key for key in growing if after[key] - before[key] >= _GROWTH}
        if not growing:
            return
        before = after
    raise AssertionError(f"{growing} grew in each of {_ROUNDS} rounds")


def test_clients_that_stop_reading_and_vanish(stack: RealStack) -> None:
    """Others are not delayed, and nothing is left once the clients have ended."""
    expected = asyncio.run(one_completion(stack.address))

    def stall_and_vanish(stack: RealStack) -> None:
        unread = stack.load().sampled_tokens + _UNREAD_TOKENS
        client = subprocess.Popen(
            [sys.executable, "-c", _STALLED_CLIENT, stack.address],
            cwd=ROOT,
            stdout=subprocess.PIPE,
        )
        assert client.stdout is not None
        assert client.stdout.readline() == b"STALLED\n"
        assert asyncio.run(one_completion(stack.address)) == expected
        stack.wait_load(lambda load: load.sampled_tokens >= unread)
        client.kill()
        client.wait()
        client.stdout.close()
        load = stack.wait_idle()
        assert load.blocks_free + load.blocks_cached == load.blocks

    assert_growth_ends(stack, stall_and_vanish)
    assert asyncio.run(one_completion(stack.address)) == expected
    log = stack.stack.log("frontend-0").read_text()
    assert "Traceback" not in log
    assert "rpc failed" not in log


def has_a_thousand(sampled_before: int, load: GetLoadResponse) -> bool:
    """Whether there are a thousand requests, some of them with tokens."""
    return load.waiting + load.running == 1000 and load.sampled_tokens > sampled_before


async def one_completion(address: str) -> list[int]:
    params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    async with AsyncLLM(address) as llm:
        (completion,) = await llm.generate("Once", params, use_tqdm=False, timeout_s=WAIT_S)
    return completion["token_ids"]


def test_a_thousand_clients_that_cancel_at_once(stack: RealStack) -> None:
    assert_growth_ends(stack, lambda stack: asyncio.run(open_and_cancel(stack)))


async def open_and_cancel(stack: RealStack) -> None:
    """Opens a thousand streams, some running and some waiting, then cancels them all.

    Which of them run is unknown: gRPC sends calls that waited for the connection in any order.
    """
    sampled = stack.load().sampled_tokens
    params = SamplingParams(temperature=1, max_tokens=1900, ignore_eos=True)
    async with aio.insecure_channel(stack.address) as channel:
        stub = InferenceServiceStub(channel)
        calls = [
            stub.GenerateStream(encode_request(f"Once {number}", params)) for number in range(1000)
        ]
        load = await asyncio.to_thread(stack.wait_load, partial(has_a_thousand, sampled))
        assert load.waiting
        for call in calls:
            call.cancel()
        load = await asyncio.to_thread(stack.wait_idle)
    assert load.blocks_free + load.blocks_cached == load.blocks


async def test_what_a_killed_frontend_asked_for_is_dropped(stack: RealStack) -> None:
    before = await asyncio.to_thread(stack.wait_idle)
    params = SamplingParams(temperature=0, max_tokens=1900, ignore_eos=True)
    async with aio.insecure_channel(stack.address) as channel:
        request = encode_request("Once", params)
        calls = [InferenceServiceStub(channel).GenerateStream(request) for _ in range(20)]
        for call in calls:
            await call.read()
        await asyncio.to_thread(stack.kill, "frontend")
        load = await asyncio.to_thread(stack.wait_idle)
    assert load.sampled_tokens - before.sampled_tokens < 20 * 1900  # not computed to the end
    assert load.blocks_free + load.blocks_cached == load.blocks
    await asyncio.to_thread(stack.wait_serving)
