from __future__ import annotations

import asyncio

import pytest

from frontend.engines import token_stream
from frontend.engines.token_stream import FinishReason, TokenStream, Waiter, WakeUps
from frontend.request import GenerationRequest, Sampling
from shared.errors import InternalError
from tests.frontend.cluster import read

SAMPLING = Sampling(
    temperature=0.0, seed=0, max_tokens=100, eos_token_ids=(), stop_token_ids=(), stop=()
)


@pytest.fixture(autouse=True)
def _one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """One stream may be read per iteration of the event loop."""
    monkeypatch.setattr(token_stream, "_CALLS_AT_ONCE", 1)


def token_streams(count: int) -> list[TokenStream]:
    wake_ups = WakeUps()
    request = GenerationRequest("r", [1], SAMPLING, None)
    return [TokenStream(number, request, Waiter(wake_ups)) for number in range(count)]


def step(streams: list[TokenStream], token_id: int) -> None:
    for stream in streams:
        stream.append(token_id, now=0.0)
        stream.waiter.wake()


async def test_tokens_that_arrive_before_a_permit_are_in_one_chunk() -> None:
    streams = token_streams(3)
    readers = [asyncio.create_task(read(stream, 0)) for stream in streams]
    await asyncio.sleep(0)  # all wait

    step(streams, 7)
    await readers[0]
    step(streams, 8)

    assert await asyncio.gather(*readers) == [[7], [7, 8], [7, 8]]


async def test_a_reader_that_returns_waits_behind_the_others() -> None:
    streams = token_streams(3)
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


async def test_a_reader_that_is_cancelled_takes_no_permit() -> None:
    first, second = token_streams(2)
    readers = [asyncio.create_task(read(stream, 0)) for stream in (first, second)]
    await asyncio.sleep(0)
    step([first, second], 5)
    readers[0].cancel()
    assert await readers[1] == [5]
    with pytest.raises(asyncio.CancelledError):
        await readers[0]


async def test_the_end_and_an_error_are_read_without_tokens() -> None:
    complete, failed = token_streams(2)
    complete.complete(FinishReason.LENGTH)
    assert await read(complete, 0) == []
    waiting = asyncio.create_task(read(failed, 0))
    await asyncio.sleep(0)
    failed.fail(InternalError("broken"))
    with pytest.raises(InternalError, match="broken"):
        await waiting


async def test_streams_that_fail_together_share_no_traceback() -> None:
    """Else the end of one call would clear the frames of another."""
    error = InternalError("broken")
    for stream in token_streams(2):
        stream.fail(error)
        with pytest.raises(InternalError) as raised:
            stream.check()
        assert len(raised.traceback) == 2
