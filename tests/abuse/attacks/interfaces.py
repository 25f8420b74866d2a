"""Attacks on HTTP and on the dashboard."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

from tests.abuse.attack import Target, attack
from tests.http2 import RawConnection

_LIMIT = (4 << 20) - 1024  # bytes of a body that is still read
_PIECE_EVERY_S = 0.1
_RAW: dict[str, Any] = {"preface": False, "reads": False}
_MESSAGES = [{"role": "user", "content": "Hello!"}]
_LONG = {"model": "model", "prompt": "Once", "max_tokens": 2000, "ignore_eos": True, "stream": True}


def _post(target: Target, path: str, body: object, length: int | None = None) -> bytes:
    """A request as it is sent; `length`: what it says of its body, if that is not true."""
    data = json.dumps(body).encode()
    headers = f"host: {target.address}\r\ncontent-type: application/json\r\n"
    headers += f"content-length: {len(data) if length is None else length}\r\n\r\n"
    return f"POST {path} HTTP/1.1\r\n{headers}".encode() + data


async def _ask(target: Target, request: bytes) -> bytes:
    """Sends a request, and counts its status. Returns the first piece of the answer."""
    host, _, port = target.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        target.gains.sent["requests"] += 1
        writer.write(request)
        await writer.drain()
        answer = await reader.read(1 << 16)
        target.gains.answers[answer[9:12].decode() or "closed"] += 1
        return answer
    finally:
        writer.transport.abort()


@attack(interface="http")
async def http_half_sent(target: Target) -> None:
    """500 connections that send a head or a body, a few bytes at a time, and never all of it."""
    numbers = itertools.count()

    async def trickle(connection: RawConnection) -> None:
        whole = _post(target, "/v1/completions", _LONG, 1 << 20)
        at_once = 1 if next(numbers) % 2 else len(whole)
        for begin in range(0, len(whole), at_once):
            await connection.send(whole[begin : begin + at_once])
            await asyncio.sleep(_PIECE_EVERY_S)
        while not connection.closed:
            await connection.send(b" ")
            await asyncio.sleep(_PIECE_EVERY_S)

    await target.hold_connections(500, trickle, **_RAW)


@attack(interface="http")
async def http_large_bodies(target: Target) -> None:
    """Bodies of 4 MiB over HTTP: one long text, many messages, many lists; 4 at once."""
    message = {"role": "user", "content": "a"}
    count = _LIMIT // len(json.dumps(message) + ", ") - 10
    bodies = [
        {
            "model": "model",
            "messages": [{"role": "user", "content": "word " * (_LIMIT // 5 - 100)}],
        },
        {"model": "model", "messages": [message] * count},
        {"model": "model", "messages": _MESSAGES, "metadata": [[]] * (_LIMIT // 4 - 100)},
    ]
    requests = itertools.cycle([_post(target, "/v1/chat/completions", body) for body in bodies])
    await target.flood(lambda: _ask(target, next(requests)), 4)


@attack(interface="dashboard")
async def dashboard_polls(target: Target) -> None:
    """The dashboard and its chat, opened again and again, 64 at a time; each is left at once."""
    watch = f"GET /events HTTP/1.1\r\nhost: {target.address}\r\n\r\n".encode()
    chat = _post(target, "/chat", {"messages": _MESSAGES})
    requests = itertools.cycle([watch, chat])
    await target.flood(lambda: _ask(target, next(requests)), 64)
