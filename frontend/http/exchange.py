"""One HTTP request and its response."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Collection, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl

import orjson
import structlog
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from frontend.callers.admission import bearer_token
from frontend.http.errors import HttpError, ParameterError, body_of, headers_of, public, status_of
from shared.rpc.reading import LARGE_BYTES, MAX_READ_S

log = structlog.get_logger(__name__)

_EVENTS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # else nginx would hold events back
)

# JSON, or the parts of a stream of server-sent events.
Answer = bytes | AsyncIterator[bytes]


@dataclass(frozen=True, slots=True)
class Request:
    """The parts of a request that the APIs read."""

    body: Any  # its JSON value; None without a body
    query: Mapping[str, str]
    parameters: Mapping[str, str]  # of the path
    request_id: str


@dataclass(eq=False)
class Exchange:
    """A request that is read, and a response that is sent, in the form of one of two APIs."""

    scope: Scope
    receive: Receive
    send: Send
    headers: dict[str, str] = field(init=False)
    is_gone: bool = False  # whether the client has disconnected
    _started: bool = False  # whether the response has a status
    _given: Collection[str] = ()  # the names of the parameters

    def __post_init__(self) -> None:
        self.headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in self.scope["headers"]
        }

    @property
    def path(self) -> str:
        return str(self.scope["path"])

    @property
    def query(self) -> dict[str, str]:
        return dict(parse_qsl(self.scope["query_string"].decode("latin-1")))

    @property
    def token(self) -> str:
        """The caller's token as OpenAI's clients send it, or Anthropic's."""
        return bearer_token(self.headers.get("authorization", "")) or self.headers.get(
            "x-api-key", ""
        )

    @property
    def peer(self) -> str:
        """The caller's address as gRPC writes it."""
        host, port = self.scope["client"] or ("unknown", 0)
        return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"

    async def read_json(self, max_bytes: int, parsing: asyncio.Lock) -> Any:
        """Reads the body. Large bodies are parsed one per turn of the event loop.

        Raises:
            HttpError: the body is too large or too slow.
            ParameterError: the body is not JSON.
        """
        try:
            async with asyncio.timeout(MAX_READ_S):
                body = await self._read(max_bytes)
        except TimeoutError:
            raise HttpError(408, f"body: it did not arrive within {MAX_READ_S:g} s") from None
        if len(body) <= LARGE_BYTES:
            found = _parse(body)
        else:
            async with parsing:
                await asyncio.sleep(0)
                found = _parse(body)
        self._given = {*found} if isinstance(found, dict) else ()
        return found

    async def _read(self, max_bytes: int) -> bytes:
        length = self.headers.get("content-length", "")
        size = int(length) if length.isdecimal() else 0  # that is announced, or has arrived
        body, more = bytearray(), True
        while more and size <= max_bytes:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                self.is_gone = True
                raise asyncio.CancelledError
            body += message["body"]
            size = max(size, len(body))
            more = message["more_body"]
        if size > max_bytes:
            raise HttpError(413, f"body: more than {max_bytes} bytes")
        return bytes(body)

    async def run(self, answer: Awaitable[Answer], headers: list[tuple[bytes, bytes]]) -> None:
        """Sends an answer, unless the client disconnects, which cancels it.

        Raises:
            ServiceError: the answer failed.
        """
        task = asyncio.current_task()
        assert task is not None
        watching = asyncio.create_task(self._watch(task))
        try:
            found = await answer
            if isinstance(found, bytes):
                await self._send_json(200, found, headers)
            else:
                await self._send_events(found, headers)
        finally:
            watching.cancel()

    async def _watch(self, task: asyncio.Task[Any]) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass
        self.is_gone = True
        task.cancel()

    async def _send_json(
        self, status: int, body: bytes, headers: list[tuple[bytes, bytes]]
    ) -> None:
        response = Response(body, status, media_type="application/json")
        response.raw_headers += headers
        self._started = True
        await response(self.scope, self.receive, self.send)

    async def _send_events(
        self, events: AsyncIterator[bytes], headers: list[tuple[bytes, bytes]]
    ) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": [*_EVENTS, *headers]}
        async with aclosing(events):  # type: ignore[type-var]  # all are generators
            async for part in events:
                if not self._started:  # an error before the first event has its own status
                    self._started = True
                    await self.send(start)
                await self.send({"type": "http.response.body", "body": part, "more_body": True})
        if not self._started:
            await self.send(start)
        await self.send({"type": "http.response.body", "body": b""})

    async def fail(self, error: Exception, headers: list[tuple[bytes, bytes]]) -> None:
        """Sends an error as the response, or as the last event of a stream."""
        shown = public(error)
        if shown is not error:
            log.error("request failed", path=self.path[:256], exc_info=error)
        body = body_of(shown, self.path, self._given, is_event=self._started)
        if not self._started:
            status = status_of(shown)
            if status in (408, 413):  # the rest of the body is not read
                headers = [*headers, (b"connection", b"close")]
            await self._send_json(status, body, [*headers, *headers_of(shown)])
            return
        named = self.path.startswith(("/v1/messages", "/v1/responses"))
        form = b"event: error\ndata: %s\n\n" if named else b"data: %s\n\ndata: [DONE]\n\n"
        await self.send({"type": "http.response.body", "body": form % body})


def _parse(body: bytes) -> Any:
    if not body:
        return None
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ParameterError("body", f"not JSON: {error.msg}") from None
