"""Streams that never pause for long, each compared with the same one from before the fault."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from nano_vllm_grpc import AsyncLLM, SamplingParams

MAX_TOKENS = 160

Request = tuple[str, SamplingParams]


def make_requests(count: int) -> list[Request]:
    """Makes greedy and seeded requests in turn, no two alike."""
    return [
        (
            f"Story {number}: once upon a time there was",
            SamplingParams(
                max_tokens=MAX_TOKENS, ignore_eos=True, temperature=number % 2, seed=number
            ),
        )
        for number in range(count)
    ]


async def stream_tokens(address: str, request: Request) -> list[int]:
    """Streams a completion over a client of its own, so that clients spread over the frontends."""
    tokens: list[int] = []
    async with AsyncLLM(address) as llm:
        async for chunk in llm.stream(*request):
            assert not chunk.token_ids or chunk.token_offset == len(tokens), "gap or repeat"
            tokens += chunk.token_ids
    return tokens


async def stream_all(address: str, requests: Sequence[Request]) -> list[list[int]]:
    return await asyncio.gather(*(stream_tokens(address, request) for request in requests))


@asynccontextmanager
async def steady_load(address: str, count: int = 20) -> AsyncIterator[None]:
    """Keeps `count` streams open while the caller does something to the stack; each must get the
    same tokens as before."""
    requests = make_requests(count)
    expected = await stream_all(address, requests)
    over = asyncio.Event()

    async def repeat(request: Request) -> list[list[int]]:
        results = [await stream_tokens(address, request)]
        while not over.is_set():
            results.append(await stream_tokens(address, request))
        return results

    async with asyncio.TaskGroup() as tasks:
        streams = [tasks.create_task(repeat(request)) for request in requests]
        yield
        over.set()
    for stream, tokens in zip(streams, expected, strict=True):
        assert len(tokens) == MAX_TOKENS
        assert all(result == tokens for result in stream.result())
