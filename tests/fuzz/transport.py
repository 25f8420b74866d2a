"""Hostility below the level of messages, the same for every service: methods, metadata,
compression, readers and writers that stall, and bytes that are not HTTP/2."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, suppress

import grpc
from grpc import aio

from tests import http2
from tests.fuzz.tally import DEADLINE_S, Tally, send
from tests.http2 import PREFACE, RawConnection, connect, frame

_PATIENCE_S = 0.2  # for a server to answer garbage or to close, neither of which it must do
_STALLED = 40  # connections at a time
_WATCH = "/grpc.health.v1.Health/Watch"


async def fuzz(address: str, service: str, method: str, seed: int, tally: Tally) -> None:
    """Attacks a service.

    Args:
        method: a unary method of `service`, to which an empty message is harmless.
    """
    rng = random.Random(seed)
    name = f"/{service}/{method}"
    async with aio.insecure_channel(address) as channel:
        await _methods(channel, service, method, tally)
        for metadata in _metadata(rng):
            await _send(channel, name, b"", tally, metadata=metadata)
        await _cancel_at_once(channel, name)
    for compression in (grpc.Compression.Gzip, grpc.Compression.Deflate):
        options = [("grpc.max_send_message_length", -1)]
        async with aio.insecure_channel(
            address, compression=compression, options=options
        ) as channel:
            for size in (0, 1 << 10, 1 << 18, 1 << 24, 1 << 26):
                await _send(channel, name, bytes(size), tally)
    await _stall(address, name, tally, rng)
    thrown = [_throw(address, garbage) for garbage in _garbage(rng)]
    tally.counts["garbage"] += len(await asyncio.gather(*thrown))


async def _send(
    channel: aio.Channel, name: str, message: bytes, tally: Tally, **options: object
) -> None:
    shown = f"{name[:80]}, {len(message)} bytes, {str(options)[:80]}"
    await send(channel, name, message, tally, shown, **options)


async def _methods(channel: aio.Channel, service: str, method: str, tally: Tally) -> None:
    names = [
        f"/{service}/Nothing",
        f"/{service}/",
        f"/{service.lower()}/{method}",
        "/",
        "//",
        "/a/b",
    ]
    names += [f"/{service}/{method}/{method}", f"/{service}/" + "x" * 5000, f"{service}/{method}"]
    names += ["/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watched"]
    for name in names:
        await _send(channel, name, b"\xff" * 9, tally)
    # More messages than a unary method takes.
    call = channel.stream_unary(f"/{service}/{method}")(_twice(b""), timeout=DEADLINE_S)
    with tally.call("two messages"):
        await call
    reflection = channel.stream_stream(
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
    )
    for message in (b"", b"\xff\xff", b"\x1a\x03a.b", b"\x22\x04\x0a\x00\x10\x05", b"\x3a\x00"):
        with tally.call(message):
            async for answer in reflection(_twice(message), timeout=DEADLINE_S):
                tally.text(answer.decode(errors="replace").replace(".py", ""), message)


async def _twice(message: bytes) -> AsyncIterator[bytes]:
    yield message
    yield message


def _metadata(rng: random.Random) -> Iterator[tuple[tuple[str, str | bytes], ...]]:
    yield tuple((f"key-{i}", "value") for i in range(20))
    yield tuple((f"key-{i}", "value" * 10) for i in range(2000))
    for size in (1_000, 7_000, 60_000, 1_000_000):
        yield (("large", "x" * size),)
        yield (("large-bin", rng.randbytes(size)),)
    yield (("traceparent", "00-zz-zz-zz"), ("authorization", "Bearer \x7e"), ("x-bin", b"\0\xff"))
    yield (("grpc-status-details-bin", rng.randbytes(50)), ("te", "nothing"))
    yield tuple(("same", "value") for _ in range(100))


async def _cancel_at_once(channel: aio.Channel, name: str) -> None:
    calls = [channel.unary_unary(name)(b"", timeout=DEADLINE_S) for _ in range(200)]
    for call in calls:
        call.cancel()
    await asyncio.gather(*(call.code() for call in calls))


def _garbage(rng: random.Random) -> Iterator[bytes]:
    settings = frame(http2.SETTINGS, b"")
    yield b""
    yield rng.randbytes(10_000)
    yield b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
    yield bytes.fromhex("16030100a5010000a10303") + rng.randbytes(160)  # TLS's first bytes
    yield PREFACE + rng.randbytes(5_000)
    yield PREFACE[:10]
    yield PREFACE + settings + frame(http2.HEADERS, rng.randbytes(200), flags=4, stream=1)
    yield PREFACE + settings + b"\xff\xff\xff\x00\x00\x00\x00\x00\x01"  # longer than allowed
    yield PREFACE + settings + frame(http2.DATA, b"x" * 100, stream=5)  # a stream never opened
    yield PREFACE + settings * 5_000
    yield PREFACE + settings + frame(http2.PING, bytes(8)) * 5_000
    yield PREFACE + settings + frame(http2.RST_STREAM, bytes(4), stream=1) * 1_000
    yield PREFACE + settings + frame(http2.WINDOW_UPDATE, b"\x7f\xff\xff\xff") * 3
    headers = frame(http2.HEADERS, b"\x00\x01a\x01b" * 100, stream=1)
    yield (
        PREFACE
        + settings
        + headers
        + frame(http2.CONTINUATION, b"\x00\x01a\x01b" * 100, stream=1) * 500
    )
    for _ in range(20):
        kind, flags = rng.randrange(256), rng.randrange(256)
        yield PREFACE + settings + frame(kind, rng.randbytes(rng.randrange(64)), flags, stream=1)


async def _throw(address: str, garbage: bytes) -> None:
    async with connect(address, preface=False) as connection:
        await connection.send(garbage)
        with suppress(TimeoutError):
            await connection.wait_until(lambda: connection.closed, _PATIENCE_S)


async def _stall(address: str, name: str, tally: Tally, rng: random.Random) -> None:
    """Opens connections that stop in the middle of something; others must be answered meanwhile,
    and after they have gone, in any order."""
    windows = (None, 0, 0, 1, 9, http2.LARGEST_WINDOW)
    leaving = [AsyncExitStack() for _ in range(_STALLED)]
    try:
        for stack in leaving:
            way = rng.choice(_WAYS_TO_STALL)
            opened = connect(
                address,
                window=rng.choice(windows),
                reads=rng.random() < 0.5,
                preface=rng.random() < 0.9,
            )
            await way(await stack.enter_async_context(opened), name, rng)
            tally.counts["stalled"] += 1
        await _answers(address, name, tally)
        rng.shuffle(leaving)
        for stack in leaving[: _STALLED // 2]:
            await stack.aclose()
        await _answers(address, name, tally)
    finally:
        for stack in leaving:
            await stack.aclose()


async def _answers(address: str, name: str, tally: Tally) -> None:
    async with aio.insecure_channel(
        address, options=[("grpc.use_local_subchannel_pool", 1)]
    ) as channel:
        for _ in range(3):
            await _send(channel, name, b"", tally)


async def _silent(connection: RawConnection, name: str, rng: random.Random) -> None:
    pass


async def _call(connection: RawConnection, name: str, rng: random.Random) -> None:
    """Makes calls and watches health; whether the answers are read is up to the connection."""
    for path in rng.choices((name, _WATCH), k=rng.randint(1, 20)):
        stream, headers = connection.call(path)
        body = frame(http2.DATA, http2.message(b""), http2.END_STREAM, stream)
        await connection.send(headers, body)


async def _half_a_message(connection: RawConnection, name: str, rng: random.Random) -> None:
    """Leaves messages unfinished: without their end, after their length, before the half-close."""
    whole = http2.message(rng.randbytes(200))
    for _ in range(rng.randint(1, 20)):
        stream, headers = connection.call(name)
        part = whole[: rng.choice((0, 3, 5, 100, len(whole)))]
        await connection.send(headers, frame(http2.DATA, part, stream=stream))
        if rng.random() < 0.3:
            await connection.send(frame(http2.RST_STREAM, bytes(4), stream=stream))


async def _half_a_frame(connection: RawConnection, name: str, rng: random.Random) -> None:
    """Stops in the middle of a frame."""
    _, headers = connection.call(name)
    await connection.send(headers[: rng.randint(1, len(headers) - 1)])


async def _endless_headers(connection: RawConnection, name: str, rng: random.Random) -> None:
    """Sends headers without their end."""
    headers = http2.call_headers(name)
    more = frame(http2.CONTINUATION, http2.literal("a", "b"), stream=1)
    await connection.send(frame(http2.HEADERS, headers, stream=1), more * rng.randint(0, 9))


_WAYS_TO_STALL = (_silent, _call, _call, _half_a_message, _half_a_frame, _endless_headers)
