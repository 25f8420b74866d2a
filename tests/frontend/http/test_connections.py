"""Connections: clients that disconnect, do not read or say nothing, and the end of the process."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from frontend.http.app import MAX_HEAD_BYTES
from frontend.http.server import _OPTIONS
from frontend.settings import FrontendSettings
from tests.frontend.fake_scheduler import FakeScheduler
from tests.frontend.http.conftest import POSTS, HttpService, Json, served
from tests.waiting import until

CHAT, TEXT, RESPONSES, ANTHROPIC = POSTS
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def connected(service: HttpService, *, reads: bool = True) -> AsyncIterator[Streams]:
    """A plain connection to the HTTP port."""
    plain = socket.socket()
    if not reads:
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    plain.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(plain, ("127.0.0.1", service.http_port))
    except OSError:
        plain.close()
        raise
    limit = 1 << 16 if reads else 1
    reader, writer = await asyncio.open_connection(sock=plain, limit=limit)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


def head(path: str, *lines: str, method: str = "POST") -> bytes:
    return "\r\n".join((f"{method} {path} HTTP/1.1", "host: localhost", *lines, "", "")).encode()


def request(path: str, body: Json) -> bytes:
    content = json.dumps(body).encode()
    return head(path, f"content-length: {len(content)}") + content


async def status(reader: asyncio.StreamReader) -> int:
    return int((await reader.readuntil(b"\r\n\r\n")).split()[1])


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_disconnects_has_its_request_aborted(
    service: HttpService, path: str, steps: int, stream: bool
) -> None:
    service.scheduler.automatic = False
    async with connected(service) as (reader, writer):
        writer.write(request(path, {**POSTS[path], "stream": stream}))
        number = (await service.scheduler.submits.get()).request
        for _ in range(steps):
            await service.step()
        if steps and stream:
            assert await status(reader) == 200
    assert await service.scheduler.aborts.get() == number
    service.scheduler.automatic = True
    await service.post(path, POSTS[path])


async def test_all_prompts_of_a_client_that_disconnects_are_aborted(service: HttpService) -> None:
    service.scheduler.automatic = False
    async with connected(service) as (_, writer):
        writer.write(request(TEXT, {"prompt": ["a", "b"], "n": 2, "max_tokens": 3}))
        numbers = [(await service.scheduler.submits.get()).request for _ in range(2)]
    expected = {number + i for number in numbers for i in range(2)}
    assert {await service.scheduler.aborts.get() for _ in expected} == expected


async def test_a_client_may_disconnect_within_its_body(service: HttpService) -> None:
    async with connected(service) as (_, writer):
        writer.write(head(TEXT, "content-length: 1000") + b"{")
        await writer.drain()
    await service.post(TEXT, POSTS[TEXT])
    await service.server.calls.finished(20)
    assert service.server.calls.count == 0


async def test_a_client_that_does_not_read_costs_only_itself(
    service: HttpService, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = (socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # else the kernel takes megabytes
    monkeypatch.setattr("frontend.http.server._OPTIONS", (*_OPTIONS, small))
    scheduler.info.max_model_len = 10_000
    await service.reconnect()
    scheduler.automatic = False
    body: Json = {"prompt": [64], "max_tokens": 5_000, "logprobs": 5, "stream": True}
    async with connected(service, reads=False) as (_, writer):
        writer.write(request(TEXT, body))
        number = (await scheduler.submits.get()).request
        for _ in range(2_000):
            scheduler.step()
        full = await until(lambda: _full_connections(service), "a connection to be full")
        other = asyncio.create_task(service.http.post(CHAT, json=POSTS[CHAT]))
        while (await scheduler.submits.get()).request not in scheduler.connection.live:
            pass
        for _ in range(3):
            scheduler.step()
        assert (await other).status_code == 200
        # All events so far would take a megabyte.
        assert full[0].transport.get_write_buffer_size() < 300_000
    assert await scheduler.aborts.get() == number


def _full_connections(service: HttpService) -> list[Any]:
    """The server's connections whose clients do not read."""
    server: Any = service.server._on_stopping.__self__  # type: ignore[attr-defined]
    return [each for each in server._state.connections if each.flow.write_paused]


async def test_a_slow_body_is_given_up(
    service: HttpService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("frontend.http.exchange.MAX_READ_S", 0.05)
    for path in POSTS:
        async with connected(service) as (reader, writer):
            writer.write(head(path, "content-length: 1000") + b"{")
            assert await status(reader) == 408
            body = json.loads((await reader.read()).decode())  # until the server closes
            assert body["error"]["type"] == "invalid_request_error"


async def test_a_silent_connection_is_closed(
    service: HttpService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("frontend.http.server._HEAD_S", 0.05)
    for sent in (b"", b"POST /v1", head(TEXT)[:-2]):
        async with connected(service) as (reader, writer):
            writer.write(sent)
            assert await reader.read() == b""


async def test_a_head_that_does_not_end_has_a_limit(service: HttpService) -> None:
    begin = head(TEXT)[:-2] + b"x-long: "
    async with connected(service) as (reader, writer):
        writer.write(begin.ljust(MAX_HEAD_BYTES, b"x"))
        await writer.drain()
        writer.write(b"x")
        assert await status(reader) == 431
        assert await reader.read() == b""


async def test_a_later_head_of_a_connection_has_a_limit_too(service: HttpService) -> None:
    async with connected(service) as (reader, writer):
        writer.write(head("/health", method="GET"))
        assert await status(reader) == 200
        writer.write(head(TEXT)[:-2] + b"x-long: " + b"x" * (1 << 20))
        await writer.drain()  # all of it is read, so that the answer is not lost
        assert await status(reader) == 431
    assert service.server.calls.count == 0


BAD_LENGTH = head(TEXT, "content-length: " + "9" * 5000)
BAD_CHUNK = head(TEXT, "transfer-encoding: chunked") + b"z\r\n"


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x00\x00",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nhost: localhost\r\n\r\n",
        head(TEXT, "content-length: x"),
        BAD_LENGTH,
        BAD_CHUNK,
    ],
)
async def test_what_is_not_http_is_a_bad_request(service: HttpService, sent: bytes) -> None:
    async with connected(service) as (reader, writer):
        writer.write(sent)
        assert b" 400 " in (await reader.read())[:20]
    await service.post(TEXT, POSTS[TEXT])


async def test_a_connection_serves_one_request_after_the_other(service: HttpService) -> None:
    async with connected(service) as (reader, writer):
        writer.write(2 * request(TEXT, POSTS[TEXT]))  # at once
        for _ in range(2):
            answer = await reader.readuntil(b"\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 200 OK")
            assert b"server:" not in answer
            (length,) = [
                int(line.split(b":")[1])
                for line in answer.split(b"\r\n")
                if line.startswith(b"content-length")
            ]
            assert json.loads(await reader.readexactly(length))["object"] == "text_completion"


@pytest.mark.parametrize("changes", [{"drain_timeout_s": 60.0}])
async def test_a_stream_ends_in_order_while_the_server_drains(
    scheduler: FakeScheduler, settings: FrontendSettings
) -> None:
    body = {"prompt": [64, 65], "max_tokens": 2}
    async with (
        served(settings, scheduler) as service,
        connected(service) as (idle, _),
        service.opened(TEXT, body) as lines,
    ):
        await service.step()
        (first,) = await lines.next()
        assert first["choices"][0]["text"] == "a"
        service.server.stop()
        assert await idle.read() == b""  # an idle connection is closed
        with pytest.raises(ConnectionError):
            async with connected(service):
                pass
        await service.step()
        second, done = await lines.rest()
        assert second["choices"][0]["text"] == "b"
        assert second["choices"][0]["finish_reason"] == "length"
        assert done == "[DONE]"


@pytest.mark.parametrize("path", [CHAT, TEXT, ANTHROPIC, RESPONSES])
async def test_a_stream_that_outlasts_the_grace_period_ends_with_an_error(
    scheduler: FakeScheduler, settings: FrontendSettings, path: str
) -> None:
    async with (
        served(settings, scheduler) as service,
        service.opened(path, POSTS[path]) as lines,
    ):
        await service.step()
        assert await lines.next()
        service.server.stop()
        events = await lines.rest()
    assert "this server is stopping" in str(events)
    if path == RESPONSES:
        assert events[-1]["type"] == "error"
    elif path == ANTHROPIC:
        assert events[-1]["error"]["type"] == "overloaded_error"
    else:
        assert events[-1] == "[DONE]"
        assert events[-2]["error"]["type"] == "server_error"


@pytest.mark.parametrize("path", POSTS)
async def test_a_whole_answer_that_outlasts_the_grace_period_is_an_error(
    scheduler: FakeScheduler, settings: FrontendSettings, path: str
) -> None:
    async with served(settings, scheduler) as service:
        scheduler.automatic = False
        sending = asyncio.create_task(service.http.post(path, json=POSTS[path]))
        number = (await scheduler.submits.get()).request
        service.server.stop()
        response = await sending
        assert response.status_code == 503
        assert response.json()["error"]["message"] == "this server is stopping"
        assert await scheduler.aborts.get() == number
