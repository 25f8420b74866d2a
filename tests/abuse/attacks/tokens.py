"""Calls that need no token, or do not have the right one."""

from __future__ import annotations

import asyncio
import itertools

from nano_vllm_grpc.pb import frontend_pb2 as pb
from tests import http2
from tests.abuse.attack import HEALTH, Target, attack
from tests.http2 import RawConnection

_LARGE = pb.GenerateRequest(text="a" * (1 << 20)).SerializeToString()


@attack()
async def no_token(target: Target) -> None:
    """Calls without a token, 64 at a time, each with a message of 1 MiB."""
    async with target.channel() as channel:
        await target.flood(lambda: target.ask(channel, "Generate", _LARGE, ()), 64)


@attack()
async def wrong_tokens(target: Target) -> None:
    """Calls with tokens that are guessed, 64 at a time."""
    guesses = itertools.count(10**15)
    async with target.channel() as channel:

        async def send() -> None:
            guess = (("authorization", f"Bearer {next(guesses)}"),)
            await target.ask(channel, "GetModel", b"", guess)

        await target.flood(send, 64)


@attack()
async def unknown_methods(target: Target) -> None:
    """Calls of methods that do not exist, 64 at a time."""
    async with target.channel() as channel:
        await target.flood(lambda: target.ask(channel, "/a.B/C", b"", ()), 64)


@attack()
async def health_checks(target: Target) -> None:
    """Health checks, which need no token, 64 at a time."""
    async with target.channel() as channel:
        await target.flood(lambda: target.ask(channel, f"{HEALTH}/Check", b"", ()), 64)


@attack(kills="worker")
async def health_watchers(target: Target) -> None:
    """4,000 health watches, which all receive that a worker has died and is back."""

    async def watch(connection: RawConnection) -> None:
        for _ in range(200):
            stream, headers = connection.call(f"{HEALTH}/Watch")
            body = http2.frame(http2.DATA, http2.message(b""), http2.END_STREAM, stream)
            await connection.send(headers, body)
            target.gains.sent["streams"] += 1
            await asyncio.sleep(0)

    await target.hold_connections(20, watch)
