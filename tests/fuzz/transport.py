"""Hostility below the level of messages, the same for every service: methods, metadata,
compression, and bytes that are not HTTP/2."""

from __future__ import annotations

import asyncio
import random
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress

import grpc
from grpc import aio

from tests.fuzz.tally import DEADLINE_S, Tally, unary

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_PATIENCE_S = 0.2  # for a server to answer garbage or to close, neither of which it must do
_DATA, _HEADERS, _RST, _SETTINGS, _PING, _WINDOW, _CONTINUATION = 0, 1, 3, 4, 6, 8, 9


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
    for garbage in _garbage(rng):
        await _throw(address, garbage)
        tally.counts["garbage"] += 1


async def _send(
    channel: aio.Channel, name: str, message: bytes, tally: Tally, **options: object
) -> None:
    shown = f"{name[:80]}, {len(message)} bytes, {str(options)[:80]}"
    try:
        await unary(channel, name, message, **options)
        tally.status(shown, None)
    except aio.AioRpcError as error:
        tally.status(shown, error)


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
    try:
        await call
        tally.status("two messages", None)
    except aio.AioRpcError as error:
        tally.status("two messages", error)
    reflection = channel.stream_stream(
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
    )
    for message in (b"", b"\xff\xff", b"\x1a\x03a.b", b"\x22\x04\x0a\x00\x10\x05", b"\x3a\x00"):
        try:
            async for answer in reflection(_twice(message), timeout=DEADLINE_S):
                tally.text(answer.decode(errors="replace").replace(".py", ""), message)
            tally.status(message, None)
        except aio.AioRpcError as error:
            tally.status(message, error)


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
    settings = _frame(_SETTINGS, b"")
    yield b""
    yield rng.randbytes(10_000)
    yield b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
    yield bytes.fromhex("16030100a5010000a10303") + rng.randbytes(160)  # TLS's first bytes
    yield _PREFACE + rng.randbytes(5_000)
    yield _PREFACE[:10]
    yield _PREFACE + settings + _frame(_HEADERS, rng.randbytes(200), flags=4, stream=1)
    yield _PREFACE + settings + b"\xff\xff\xff\x00\x00\x00\x00\x00\x01"  # longer than allowed
    yield _PREFACE + settings + _frame(_DATA, b"x" * 100, stream=5)  # a stream never opened
    yield _PREFACE + settings * 5_000
    yield _PREFACE + settings + _frame(_PING, bytes(8)) * 5_000
    yield _PREFACE + settings + _frame(_RST, bytes(4), stream=1) * 1_000
    yield _PREFACE + settings + _frame(_WINDOW, b"\x7f\xff\xff\xff") * 3
    headers = _frame(_HEADERS, b"\x00\x01a\x01b" * 100, stream=1)
    yield (
        _PREFACE
        + settings
        + headers
        + _frame(_CONTINUATION, b"\x00\x01a\x01b" * 100, stream=1) * 500
    )
    for _ in range(20):
        kind, flags = rng.randrange(256), rng.randrange(256)
        yield _PREFACE + settings + _frame(kind, rng.randbytes(rng.randrange(64)), flags, stream=1)


def _frame(kind: int, payload: bytes, flags: int = 0, stream: int = 0) -> bytes:
    """Encodes an HTTP/2 frame: RFC 9113, 4.1."""
    head = struct.pack(">IBBI", len(payload), kind, flags, stream)
    return head[1:] + payload


async def _throw(address: str, garbage: bytes) -> None:
    async with _connection(address) as (reader, writer):
        with suppress(ConnectionError, TimeoutError):
            writer.write(garbage)
            await writer.drain()
            async with asyncio.timeout(_PATIENCE_S):
                while await reader.read(1 << 16):
                    pass


@asynccontextmanager
async def _connection(
    address: str,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    if address.startswith("unix:"):
        reader, writer = await asyncio.open_unix_connection(address.removeprefix("unix:"))
    else:
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
