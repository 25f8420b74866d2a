"""Calls that need no token, or do not have the right one."""

from __future__ import annotations

import itertools

from grpc_reflection.v1alpha import reflection_pb2

from tests.abuse.attack import HEALTH, Target, attack

_REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


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
async def health_checks(target: Target) -> None:
    """Health checks, which need no token, 64 at a time."""
    async with target.channel() as channel:
        await target.flood(lambda: target.ask(channel, f"{HEALTH}/Check", b"", ()), 64)


@attack(interface="reflection")
async def reflection(target: Target) -> None:
    """Questions for the description of the service, 64 at a time."""
    question = reflection_pb2.ServerReflectionRequest(
        file_containing_symbol="nanovllm.v1.InferenceService"
    ).SerializeToString()
    async with target.channel() as channel:
        await target.flood(lambda: target.ask(channel, _REFLECTION, question), 64)
