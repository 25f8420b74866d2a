"""Promise 3: a frontend is killed. The scheduler drops its requests and others notice nothing; in
tests/test_kills.py the client library goes on at another one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

import psutil
import pytest
from grpc import StatusCode, aio

from nano_vllm_grpc import SamplingParams
from nano_vllm_grpc.pb.frontend_pb2_grpc import InferenceServiceStub
from nano_vllm_grpc.wire import decode_chunk, encode_request
from tests.faults.transcript import Transcript
from tests.stack import RealStack, running_stack

_CONNECTION_OF_ITS_OWN = (("grpc.use_local_subchannel_pool", 1),)
_STORY = "Once upon a time, there was a little fox who"


def _params(**values: Any) -> SamplingParams:
    return SamplingParams(temperature=0, ignore_eos=True, **values)


@pytest.fixture(scope="module")
def stack_of_module() -> Iterator[RealStack]:
    with running_stack(frontends=2, kv_blocks=1024, block_size=16) as running:
        yield running


@pytest.fixture
def stack(stack_of_module: RealStack) -> RealStack:
    """The module's stack, at rest also after a test that was given up halfway."""
    stack_of_module.wait_serving()
    stack_of_module.wait_idle()
    return stack_of_module


async def test_what_a_killed_frontend_asked_for_is_dropped(stack: RealStack) -> None:
    """Seen through one plain connection, to one of the two."""
    before = await asyncio.to_thread(stack.wait_load, lambda load: load.frontends == 2)
    async with aio.insecure_channel(stack.address) as channel:
        request = encode_request(_STORY, _params(max_tokens=1900))
        calls = [InferenceServiceStub(channel).GenerateStream(request) for _ in range(20)]
        for call in calls:
            await call.read()
        await asyncio.to_thread(stack.wait_load, lambda load: load.running == 20)
        for index in (0, 1):
            await asyncio.to_thread(stack.kill, "frontend", index)
        load = await asyncio.to_thread(
            stack.wait_load, lambda load: not (load.running or load.waiting or load.blocks_used)
        )
        # They were not computed to the end.
        assert load.sampled_tokens - before.sampled_tokens < 20 * 1900
        assert load.blocks_free + load.blocks_cached == load.blocks
    await asyncio.to_thread(stack.wait_serving)


async def test_streams_of_other_frontends_are_untouched(stack: RealStack) -> None:
    """Seen by a plain client, which resumes nothing."""
    request = encode_request(_STORY, _params(max_tokens=600))
    victim = await asyncio.to_thread(stack.pid, "frontend", 0)
    async with AsyncExitStack() as opened:
        channels: list[aio.Channel] = []
        while not 0 < connections_to(stack, victim) < len(channels):
            channel = aio.insecure_channel(stack.address, options=_CONNECTION_OF_ITS_OWN)
            channels.append(await opened.enter_async_context(channel))
            await channel.channel_ready()
        hit = connections_to(stack, victim)
        calls = [InferenceServiceStub(channel).GenerateStream(request) for channel in channels]
        transcripts = [Transcript() for _ in calls]
        for call, transcript in zip(calls, transcripts, strict=True):
            transcript.add(decode_chunk(await call.read()))
        await asyncio.to_thread(
            stack.kill, "frontend", 0, lambda: stack.load().running == len(calls)
        )
        codes = await asyncio.gather(*map(rest_of, calls, transcripts))
    whole = [t for t, code in zip(transcripts, codes, strict=True) if code is StatusCode.OK]
    assert codes.count(StatusCode.UNAVAILABLE) == hit
    assert len(whole) == len(codes) - hit > 0
    assert all(transcript.num_tokens == 600 for transcript in whole)
    assert not any(transcript.compare(whole[0]).differences for transcript in whole)
    await asyncio.to_thread(stack.wait_serving)


def connections_to(stack: RealStack, pid: int) -> int:
    """The number of client connections that this frontend has."""
    port = int(stack.address.rpartition(":")[2])
    found = psutil.Process(pid).net_connections("tcp")
    return sum(each.laddr[1] == port for each in found if each.status == psutil.CONN_ESTABLISHED)


async def rest_of(call: Any, transcript: Transcript) -> StatusCode:
    """Adds the rest of the stream; returns the status with which it ended."""
    try:
        while (message := await call.read()) is not aio.EOF:
            transcript.add(decode_chunk(message))
    except aio.AioRpcError as error:
        return error.code()
    return StatusCode.OK
