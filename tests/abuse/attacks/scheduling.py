"""Valid requests by one client, in numbers or kinds that leave little to others."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from nano_vllm_grpc.pb import frontend_pb2 as pb
from tests.abuse.attack import SERVICE, Target, attack

_CALLS = 512  # of a client


def _request(prompt: list[int], **sampling: Any) -> pb.GenerateRequest:
    params = pb.SamplingParams(**{"ignore_eos": True, "temperature": 1, **sampling})
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), sampling=params)


async def _flood(target: Target, requests: list[pb.GenerateRequest], at_once: int) -> None:
    rng = random.Random(1)
    async with target.channel() as channel:

        async def send() -> None:
            await target.generate(channel, rng.choice(requests))

        await target.flood(send, at_once)


def _prompts(length: int, count: int) -> list[list[int]]:
    """Prompts without a common prefix."""
    rng = random.Random(1)
    return [rng.choices(range(3, 1500), k=length) for _ in range(count)]


@attack()
async def full_queue(target: Target) -> None:
    """Sends as many requests at once as one client may have."""
    await _flood(target, [_request(p, max_tokens=128) for p in _prompts(16, 64)], _CALLS)


@attack()
async def long_prompts(target: Target) -> None:
    """Prompts of 20,000 tokens for one token of answer, 4 at once."""
    length = min(20_000, await target.max_model_len() - 8)
    await _flood(target, [_request(p, max_tokens=1) for p in _prompts(length, 16)], 4)


@attack()
async def cancel_storm(target: Target) -> None:
    """Requests that are cancelled at once, or after the first token, 64 at a time."""
    requests = [_request(p, max_tokens=500) for p in _prompts(32, 16)]
    messages = [request.SerializeToString() for request in requests]
    async with target.channel() as channel:

        async def send() -> None:
            call: Any = channel.unary_stream(f"/{SERVICE}/GenerateStream")(
                random.choice(messages), metadata=target.metadata
            )
            target.gains.sent["calls"] += 1
            reading = asyncio.ensure_future(call.read())
            await asyncio.wait([reading], timeout=random.choice((0, 0.001, 0.05)))
            call.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            target.gains.answers["cancelled"] += 1

        await target.flood(send, 64)
