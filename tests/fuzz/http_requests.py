"""Hostile HTTP/1.1 requests, and how to send them: JSON of other shapes and values,
other headers and paths, and bytes that are no request."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from itertools import takewhile
from typing import Any

import h11

from tests.fuzz import mutations
from tests.fuzz.corpus import Case
from tests.fuzz.json_values import twist

_JSON = "application/json"
_HEADERS: tuple[tuple[str, str], ...] = (
    ("content-type", "text/plain"),
    ("content-type", f"{_JSON}; charset=utf-16"),
    ("content-encoding", "gzip"),
    ("accept", "text/html"),
    ("authorization", "Bearer " + "x" * 4000),
    ("expect", "100-continue"),
    ("expect", "a miracle"),
    ("upgrade", "websocket"),
    ("transfer-encoding", "chunked"),
    ("content-length", "-1"),
    ("content-length", "99999999999999999999"),
    ("host", ""),
    ("host", "localhost:99999999"),
    ("origin", "null"),
    ("range", "bytes=5-1,-9"),
    ("if-none-match", '"'),
    ("if-modified-since", "never"),
    ("traceparent", "00-zz-zz-zz"),
    ("x-request-id", "\xff\xfe"),
    ("cookie", "a=b;" * 2000),
)
_PATHS = (
    "?",
    "?a=%ff&a[]=1",
    "/",
    "//",
    "/..",
    "/%2e%2e/%2e%2e/etc/passwd",
    "%00",
    "#",
    "/\xe9",
    ";",
)
_METHODS = ("GET", "HEAD", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "BREW")


@dataclass(frozen=True)
class Answer:
    """A response; its status is 0 if the server closed without one."""

    status: int = 0
    body: bytes = b""


def encode(method: str, path: str, body: bytes, headers: Sequence[tuple[str, str]] = ()) -> bytes:
    """A request as it is sent; of two headers with one name the later one stands."""
    usual = {"host": "localhost", "content-length": str(len(body)), "content-type": _JSON}
    lines = [f"{method} {path} HTTP/1.1"]
    lines += [f"{name}: {value}" for name, value in (usual | dict(headers)).items()]
    return "\r\n".join((*lines, "\r\n")).encode("latin-1") + body


def draw_cases(examples: Sequence[tuple[str, str, Any]], count: int, seed: int) -> Iterator[Case]:
    """Draws requests like the examples: method, path, and the body as JSON, or None."""
    rng = random.Random(seed)
    return (_draw_case(rng, *rng.choice(examples)) for _ in range(count))


def _draw_case(rng: random.Random, method: str, path: str, value: Any) -> Case:
    name = f"{method} {path}"
    body = b"" if value is None else json.dumps(twist(value, rng)).encode()
    headers: list[tuple[str, str]] = []
    match rng.randrange(10):
        case 0:
            body = mutations.mutate(body, rng)
        case 1:
            path += rng.choice(_PATHS)
        case 2:
            method = rng.choice(_METHODS)
        case 3 | 4:
            headers = rng.choices(_HEADERS, k=rng.randint(1, 3))
        case 5:
            return Case(name, (mutations.mutate(encode(method, path, body), rng),))
    return Case(name, (encode(method, path, body, headers),))


def is_whole(message: bytes) -> bool:
    """Whether a server knows where the request ends, and that it is one."""
    connection = h11.Connection(h11.SERVER)
    try:
        connection.receive_data(message)
        while isinstance(event := connection.next_event(), (h11.Request, h11.Data)):
            pass
        return isinstance(event, h11.EndOfMessage)
    except h11.RemoteProtocolError:
        return False


def exchange(address: str, message: bytes, timeout_s: float) -> Answer:
    """Sends bytes as they are, and reads the answer to its end; a stream of events that answers a
    GET has none, and is read to its first. What is no whole request is followed by the end.

    Raises:
        TimeoutError: nothing came for so long.
    """
    host, _, port = address.rpartition(":")
    method = "HEAD" if message.startswith(b"HEAD ") else "GET"  # whether a body will follow
    with socket.create_connection((host, int(port)), timeout_s) as connection:
        with suppress(OSError):  # it may have answered before all was written
            connection.sendall(message)
            if not is_whole(message):
                connection.shutdown(socket.SHUT_WR)
        with HTTPResponse(connection, method=method) as response:
            try:
                response.begin()
                streams = response.headers.get_content_type() == "text/event-stream"
                endless = streams and message.startswith(b"GET")
                lines = iter(response.readline, b"")
                body = b"".join(takewhile(bytes.strip, lines)) if endless else response.read()
            except (HTTPException, ConnectionError):  # closed, or cut short
                return Answer()
    return Answer(response.status, body)
