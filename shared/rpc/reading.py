"""Reads the messages of accepted calls, within limits and a few per turn of the event loop."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc import aio

from shared.errors import InvalidArgumentError
from shared.rpc.callers import CALLER, Caller, network_of
from shared.rpc.message_memory import MAX_BYTES_PER_CALLER, Hold, MessageMemory
from shared.rpc.turns import Turns
from shared.rpc.wire_scan import scan

Context = aio.ServicerContext[Any, Any]
Parse = Any  # `FromString` of a message type

# gRPC rejects a message larger than this many times `max_message_bytes` with RESOURCE_EXHAUSTED,
# before all of it has arrived. The reader rejects smaller excesses with INVALID_ARGUMENT.
UNREAD_FACTOR = 4

# Calls that begin in one iteration of the event loop; each takes some tenths of a millisecond.
_CALLS_AT_ONCE = 2

# Messages above this size are scanned and parsed for at most half of the time. The largest ones, of
# packed numbers, take 25 ms each.
_LARGE_BYTES = 64 << 10

# Streams that any caller may send. Streams between services are read as they arrive.
_PUBLIC_STREAMS = "/grpc.reflection."

_HOLD: ContextVar[Hold] = ContextVar("hold")


def release_message() -> None:
    """Gives back the memory of the current call's message, which the handler has dropped. Without
    this, the call holds the memory until it ends."""
    hold = _HOLD.get(None)
    if hold is not None:
        hold.release()


class MessageReader(aio.ServerInterceptor):
    """Reads and parses messages, and rejects unreadable ones with INVALID_ARGUMENT.

    It also rejects a message that exceeds `max_message_bytes`, has too many fields or sets two
    fields of a oneof. gRPC itself reads the message of a unary call before an interceptor can
    reject the call. This reader reads it after the other interceptors have accepted the call, so it
    must be the last interceptor. It treats the call as a stream of one message, which looks the
    same on the wire.
    """

    def __init__(self, max_message_bytes: int, memory: MessageMemory) -> None:
        self._max_message_bytes = max_message_bytes
        self._memory = memory
        self._turns = Turns(_CALLS_AT_ONCE)
        self._parsing = Turns(1)
        self._handlers: dict[str, Any] = {}  # by method

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return handler  # an unknown method
        method = handler_call_details.method
        if method not in self._handlers:
            self._handlers[method] = self._reading(handler, method.startswith(_PUBLIC_STREAMS))
        return self._handlers[method]

    def _reading(self, handler: Any, bounded: bool) -> Any:
        """A handler with the behaviour of `handler`, whose messages this reader reads.

        Args:
            bounded: whether the limits on memory also hold for the messages of a stream.
        """
        of_one = handler.unary_unary or handler.unary_stream
        behavior = of_one or handler.stream_unary or handler.stream_stream
        parse = handler.request_deserializer
        make_handler = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )

        async def request(requests: AsyncIterator[bytes], context: Context) -> Any:
            if of_one:
                return await self._read(context, parse)
            return self._messages(requests, context, parse, bounded)

        async def call(requests: AsyncIterator[bytes], context: Context) -> Any:
            try:
                return await behavior(await request(requests, context), context)
            finally:
                release_message()

        async def generate(requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[Any]:
            try:
                async for response in behavior(await request(requests, context), context):
                    yield response
            finally:
                release_message()

        return make_handler(
            generate if inspect.isasyncgenfunction(behavior) else call,
            response_serializer=_unless_serialized(handler.response_serializer),
        )

    async def _read(self, context: Context, parse: Parse) -> Any:
        """Reads the one message of a call; the call then holds the message's memory."""
        caller = _caller(context)
        await self._turns.take(caller.name)
        data, hold = await self._memory.receive(caller, lambda: _one(context))
        _HOLD.set(hold)
        _check_size(data, self._max_message_bytes)
        fields = scan(data, parse.__self__.DESCRIPTOR)
        unfinished = _walk_on(fields)
        while unfinished:
            async with self._parsing.half_the_time(caller.name):
                unfinished = _walk_on(fields)
        if len(data) <= _LARGE_BYTES:
            return _parsed(data, parse)
        async with self._parsing.half_the_time(caller.name):
            return _parsed(data, parse)

    async def _messages(
        self, requests: AsyncIterator[bytes], context: Context, parse: Parse, bounded: bool
    ) -> AsyncIterator[Any]:
        async for data in self._bounded(requests, context) if bounded else requests:
            yield decode_message(data, parse, self._max_message_bytes)

    async def _bounded(
        self, requests: AsyncIterator[bytes], context: Context
    ) -> AsyncIterator[bytes]:
        """Reads a stream's messages one after another, each with a place of its own."""
        messages, ended = aiter(requests), False

        async def read() -> bytes:
            nonlocal ended
            data = await anext(messages, None)
            ended = data is None
            return data or b""

        while True:
            data, hold = await self._memory.receive(_caller(context), read)
            try:
                if ended:
                    return
                yield data
            finally:
                hold.release()


def decode_message(data: bytes, parse: Parse, max_bytes: int) -> Any:
    """Parses a message of a stream. If two fields of a oneof are set, the last one counts.

    Raises:
        InvalidArgumentError: the message is too large, does not parse or holds invalid UTF-8.
    """
    _check_size(data, max_bytes)
    return _parsed(data, parse)


def _check_size(data: bytes, limit: int) -> None:
    if len(data) > limit:
        raise InvalidArgumentError("message", f"{len(data)} bytes; the limit is {limit}")


def _walk_on(fields: Iterator[int]) -> bool:
    """Scans a few fields; returns whether there are more."""
    with _as_unreadable():
        return next(fields, None) is not None


def _parsed(data: bytes, parse: Parse) -> Any:
    with _as_unreadable():
        return parse(data)


def _unless_serialized(serialize: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
    """Wraps `serialize` to leave bytes alone: a handler serializes large responses in pieces."""
    return lambda response: response if isinstance(response, bytes) else serialize(response)


def _caller(context: Context) -> Caller:
    return CALLER.get() or Caller(network_of(context.peer()), MAX_BYTES_PER_CALLER)


async def _one(context: Context) -> bytes:
    data = await context.read()
    if not isinstance(data, bytes):  # the end of the stream
        raise InvalidArgumentError("message", "missing; send one")
    return data


@contextmanager
def _as_unreadable() -> Iterator[None]:
    try:
        yield
    except (DecodeError, UnicodeDecodeError) as error:
        raise InvalidArgumentError("message", "not a readable message of this method") from error
