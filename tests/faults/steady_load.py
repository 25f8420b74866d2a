"""Streams that never pause for long, each compared with what it was before anything happened."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import grpc
from grpc import aio

from shared.pb import frontend_pb2 as pb
from shared.pb.frontend_pb2_grpc import InferenceServiceStub

MAX_TOKENS = 160
# A connection of its own for each stream, so that they spread over the frontends.
_CHANNEL_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 500),
)

# What a server that is gone or going answers. CANCELLED is gRPC's own word for calls that reach a
# server just as it begins to drain.
_AGAIN = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


def make_requests(count: int) -> list[pb.GenerateRequest]:
    """Greedy and seeded ones in turn, no two alike."""
    requests = []
    for number in range(count):
        request = pb.GenerateRequest(text=f"Story {number}: once upon a time there was")
        request.sampling.max_tokens = MAX_TOKENS
        request.sampling.ignore_eos = True
        if number % 2:
            request.sampling.temperature, request.sampling.seed = 1.0, number
        else:
            request.sampling.temperature = 0.0
        requests.append(request)
    return requests


async def stream_tokens(address: str, request: pb.GenerateRequest) -> list[int]:
    """The completion. Where a server ends the stream as unavailable, the next one goes on after
    the tokens that have come."""
    rest = pb.GenerateRequest()
    rest.CopyFrom(request)
    tokens: list[int] = []
    async with aio.insecure_channel(address, options=_CHANNEL_OPTIONS) as channel:
        stub = InferenceServiceStub(channel)
        while True:
            try:
                async for chunk in stub.GenerateStream(rest, wait_for_ready=True):
                    assert not chunk.token_ids or chunk.token_offset == len(tokens), "gap or repeat"
                    tokens += chunk.token_ids
                    if chunk.finish_reason:
                        return tokens
            except aio.AioRpcError as error:
                if error.code() not in _AGAIN:
                    raise
            rest.resume_token_ids[:] = tokens
            await asyncio.sleep(0.1)  # not to ask a frontend without engine too often


async def stream_all(address: str, requests: Sequence[pb.GenerateRequest]) -> list[list[int]]:
    return await asyncio.gather(*(stream_tokens(address, request) for request in requests))


@asynccontextmanager
async def steady_load(address: str, count: int = 20) -> AsyncIterator[None]:
    """`count` streams at a time, again and again while the caller does something to the stack;
    afterwards each must have had the tokens that it had before."""
    requests = make_requests(count)
    expected = await stream_all(address, requests)
    over = asyncio.Event()

    async def repeat(request: pb.GenerateRequest) -> list[list[int]]:
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
