"""Promise 3: a frontend is killed. The scheduler drops its requests, others notice nothing, and
the client library goes on at another one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import psutil
import pytest
from grpc import StatusCode, aio

from frontend.client import AsyncLLM, SamplingParams, StructuredOutput
from frontend.client.wire import decode_chunk, encode_request
from shared.pb.frontend_pb2_grpc import InferenceServiceStub
from tests.faults.transcript import Transcript
from tests.stack import RealStack, running_stack
from tests.waiting import WAIT_S

_CONNECTIONS = 8  # some reach each frontend; how many is up to the kernel
_CONNECTION_OF_ITS_OWN = (("grpc.use_local_subchannel_pool", 1),)
_STORY = "Once upon a time, there was a little fox who"


def _params(**values: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 300, "ignore_eos": True, **values})


REQUESTS: Mapping[str, SamplingParams] = {
    "greedy": _params(temperature=0),
    "seeded": _params(temperature=1, seed=1),
    "features": _params(temperature=1.2, seed=2, top_k=50, frequency_penalty=0.5, min_tokens=30),
    "logprobs": _params(temperature=1, seed=3, logprobs=2, prompt_logprobs=1),
    "stop string": _params(temperature=1, seed=4, stop=["zebra", "the end of all"]),
    "several": _params(temperature=1, seed=5, n=3, max_tokens=150, logprobs=0),
    "beams": SamplingParams(beam_width=3, max_tokens=60),
    "regex": SamplingParams(
        temperature=1,
        seed=6,
        structured_output=StructuredOutput(regex=r"(yes|no)(, [a-z]{3,8}){20}!"),
    ),
}


# They run to `max_tokens`.
_LONG = ("greedy", "seeded", "features", "logprobs", "stop string")


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


@dataclass
class Streams:
    """Requests that the client library is reading, and the transcript of each so far."""

    transcripts: dict[str, Transcript]
    news: asyncio.Condition
    tasks: dict[str, asyncio.Task[None]]

    async def wait_for_tokens(self, count: int) -> None:
        """Returns once every stream has `count` tokens, except beams, which come at the end."""
        async with asyncio.timeout(WAIT_S), self.news:
            await self.news.wait_for(
                lambda: all(
                    each.num_tokens >= count or self.tasks[name].done() or name == "beams"
                    for name, each in self.transcripts.items()
                )
            )

    def are_open(self) -> bool:
        """Whether the long ones are open, for `RealStack.kill`."""
        assert not any(task.done() and task.exception() for task in self.tasks.values())
        return not any(self.tasks[name].done() for name in _LONG)

    async def ended(self) -> dict[str, Transcript]:
        """Returns the transcripts once all requests have ended without an error."""
        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(*self.tasks.values())
        return self.transcripts


@asynccontextmanager
async def open_streams(llm: AsyncLLM) -> AsyncIterator[Streams]:
    transcripts = {name: Transcript() for name in REQUESTS}
    news = asyncio.Condition()

    async def read(name: str) -> None:
        request_ids = set()
        async for chunk in llm.stream(_STORY, REQUESTS[name]):
            transcripts[name].add(chunk)
            request_ids.add(chunk.request_id)
            async with news:
                news.notify_all()
        assert len(request_ids) == 1
        async with news:
            news.notify_all()

    tasks = {name: asyncio.create_task(read(name)) for name in REQUESTS}
    try:
        yield Streams(transcripts, news, tasks)
    finally:
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)


async def undisturbed(stack: RealStack) -> dict[str, Transcript]:
    async with AsyncLLM(stack.address) as llm, open_streams(llm) as streams:
        return await streams.ended()


def assert_undamaged(found: dict[str, Transcript], expected: dict[str, Transcript]) -> None:
    damage = {name: each.compare(expected[name]).differences for name, each in found.items()}
    assert not {name: differences for name, differences in damage.items() if differences}


async def test_streams_go_on_at_another_frontend(stack: RealStack) -> None:
    expected = await undisturbed(stack)
    async with (
        AsyncLLM(stack.address, connections=_CONNECTIONS) as llm,
        open_streams(llm) as streams,
    ):
        await streams.wait_for_tokens(10)
        pid = await asyncio.to_thread(stack.kill, "frontend", 0, streams.are_open)
        await streams.wait_for_tokens(40)
        await asyncio.to_thread(stack.wait_replaced, "frontend", 0, pid)
        await asyncio.to_thread(stack.kill, "frontend", 1, streams.are_open)
        assert_undamaged(await streams.ended(), expected)
    await asyncio.to_thread(stack.wait_serving)
    await asyncio.to_thread(stack.wait_idle)


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
    request = encode_request(_STORY, _params(temperature=0, max_tokens=600))
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
