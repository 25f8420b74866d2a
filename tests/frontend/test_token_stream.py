from __future__ import annotations

import asyncio

import pytest

from frontend.engines.token_stream import FinishReason, TokenStream, Waiter
from frontend.request import Request, Sampling
from shared.errors import InternalError
from shared.rpc.turns import Turns
from tests.frontend.cluster import read
from tests.turns import counting_turns

SAMPLING = Sampling(
    temperature=0.0, seed=0, max_tokens=100, eos_token_ids=(), stop_token_ids=(), stop=()
)


def token_streams(*callers: str) -> list[TokenStream]:
    """One that may be read per iteration of the event loop."""
    turns = Turns(1)
    request = Request("r", [1], SAMPLING, None)
    return [TokenStream(n, request, Waiter(turns, caller)) for n, caller in enumerate(callers)]


def step(streams: list[TokenStream], token_id: int) -> None:
    for stream in streams:
        stream.append(token_id, now=0.0)
        stream.waiter.wake()


async def test_tokens_that_arrive_before_a_permit_are_in_one_chunk() -> None:
    streams = token_streams(*"aaa")
    readers = [asyncio.create_task(read(stream, 0)) for stream in streams]
    await asyncio.sleep(0)  # all wait

    step(streams, 7)
    await readers[0]
    step(streams, 8)

    assert await asyncio.gather(*readers) == [[7], [7, 8], [7, 8]]


async def test_a_reader_that_returns_waits_behind_the_others() -> None:
    streams = token_streams(*"aaa")
    order: list[int] = []

    async def read_all(stream: TokenStream) -> None:
        seen = 0
        while seen < 4:
            tokens = await read(stream, seen)
            seen += len(tokens)
            order.append(stream.number)
            if seen < 4:
                stream.append(0, now=0.0)  # the engine is faster than the readers
                stream.waiter.wake()

    readers = [asyncio.create_task(read_all(stream)) for stream in streams]
    await asyncio.sleep(0)
    step(streams, 0)
    await asyncio.gather(*readers)
    assert order == 4 * [0, 1, 2]


async def test_callers_alternate() -> None:
    streams = token_streams(*"aaaab")
    order: list[int] = []

    async def read_one(stream: TokenStream) -> None:
        await read(stream, 0)
        order.append(stream.number)

    readers = [asyncio.create_task(read_one(stream)) for stream in streams]
    await asyncio.sleep(0)
    step(streams, 0)
    await asyncio.gather(*readers)
    assert order == [0, 4, 1, 2, 3]


async def test_a_reader_that_is_cancelled_takes_no_permit() -> None:
    first, second = token_streams(*"aa")
    readers = [asyncio.create_task(read(stream, 0)) for stream in (first, second)]
    await asyncio.sleep(0)
    step([first, second], 5)
    readers[0].cancel()
    assert await readers[1] == [5]
    with pytest.raises(asyncio.CancelledError):
        await readers[0]


async def test_calls_that_are_cancelled_at_once_end_one_after_another() -> None:
    with counting_turns() as turns:

        async def call(stream: TokenStream) -> None:
            try:
                await read(stream, 0)
            finally:
                turns.done(1)

        calls = [asyncio.create_task(call(stream)) for stream in token_streams(*"aaabb")]
        await asyncio.sleep(0)
        for each in calls:
            each.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
    assert all(each.cancelled() for each in calls)
    assert (turns.total, turns.max) == (5, 1)


async def test_the_end_and_an_error_are_read_without_tokens() -> None:
    complete, failed = token_streams(*"aa")
    complete.complete(FinishReason.LENGTH)
    assert await read(complete, 0) == []
    waiting = asyncio.create_task(read(failed, 0))
    await asyncio.sleep(0)
    failed.fail(InternalError("broken"))
    with pytest.raises(InternalError, match="broken"):
        await waiting
