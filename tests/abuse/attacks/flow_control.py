"""HTTP/2's windows against the server: readers that do not read, writers that do not finish."""

from __future__ import annotations

import asyncio
import struct
from functools import partial

from nano_vllm_grpc.pb import frontend_pb2 as pb
from tests import http2
from tests.abuse.attack import HEALTH, SERVICE, Target, attack
from tests.http2 import RawConnection

_STREAMS = 100  # on a connection; the server allows more
_GENERATE = f"/{SERVICE}/GenerateStream"
# In chunks as wide as can be.
LONG_COMPLETION = pb.GenerateRequest(
    token_ids=pb.TokenIds(ids=[5, 6, 7]),
    sampling=pb.SamplingParams(ignore_eos=True, logprobs=20, max_tokens=1_500),
).SerializeToString()
_PIECE = bytes(http2.MAX_FRAME)


async def _open(
    target: Target, connection: RawConnection, path: str, body: bytes, count: int
) -> list[int]:
    """Opens `count` calls with one message each; returns their streams."""
    streams, frames = [], []
    for _ in range(count):
        stream, headers = connection.call(path, target.metadata)
        frames += [headers, http2.frame(http2.DATA, body, http2.END_STREAM, stream)]
        streams.append(stream)
    target.gains.sent["streams"] += count
    await connection.send(*frames)
    return streams


async def _start(target: Target, connection: RawConnection) -> list[int]:
    """Begins long completions; returns their streams."""
    return await _open(target, connection, _GENERATE, http2.message(LONG_COMPLETION), 8)


@attack(kills="worker")
async def unread_watches(target: Target) -> None:
    """Health watches with a window of 0, while a worker dies: news that cannot be delivered."""

    async def watch(connection: RawConnection) -> None:
        for body in (http2.message(b""), http2.message(b"\x0a\x1c" + SERVICE.encode())):
            await _open(target, connection, f"{HEALTH}/Watch", body, _STREAMS)

    await target.hold_connections(20, watch, window=0)


@attack()
async def shut_windows(target: Target) -> None:
    """Long completions with a window of 0: what is not read has to be kept by someone."""
    await target.hold_connections(4, partial(_start, target), window=0)


@attack()
async def slow_messages(target: Target) -> None:
    """Messages that claim to be 4 MiB on 64 streams, each sent a few KiB at a time."""

    async def start(connection: RawConnection) -> None:
        claim = struct.pack(">BI", 0, 4 << 20)
        streams = []
        for _ in range(64):
            stream, headers = connection.call(_GENERATE, target.metadata)
            await connection.send(headers, http2.frame(http2.DATA, claim, stream=stream))
            streams.append(stream)
        target.gains.sent["streams"] += len(streams)
        while target.left_s > 0 and not connection.closed:
            for stream in streams:
                await connection.send(http2.frame(http2.DATA, _PIECE, stream=stream))
                target.gains.sent["bytes"] += len(_PIECE)
            await asyncio.sleep(0.01)

    await target.hold_connections(4, start)
