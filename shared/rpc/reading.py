"""Reads the messages of calls after the other interceptors have accepted the calls."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc import aio

from shared.errors import RETRY_AFTER_S, InvalidArgumentError, QueueFullError
from shared.rpc.interceptors import Context

Parse = Callable[[bytes], Any]  # `FromString` of a message type

MAX_READ_S = 30.0  # for a call's one message to arrive
# A larger message may take 0.2 s to parse, so an iteration of the event loop parses at most one.
# Else a process would not answer for seconds if many arrived at once, and be replaced.
LARGE_BYTES = 64 << 10


class MessageReader(aio.ServerInterceptor):
    """Reads and parses messages, and rejects unreadable ones with INVALID_ARGUMENT.

    gRPC itself reads the message of a unary call before an interceptor can reject the call. This
    interceptor treats such a call as a stream of one message, which looks the same on the wire, and
    reads it when the handler begins. It must be the last interceptor.
    """

    def __init__(self) -> None:
        self._parsing = asyncio.Lock()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler: Any = await continuation(handler_call_details)
        return handler and self._reading(handler)  # None: an unknown method

    def _reading(self, handler: Any) -> Any:
        """A handler with the behaviour of `handler`, which reads its messages itself."""
        of_one = handler.unary_unary or handler.unary_stream
        behavior = of_one or handler.stream_unary or handler.stream_stream
        parse = handler.request_deserializer

        async def request(requests: AsyncIterator[bytes], context: Context) -> Any:
            return await self._read_one(context, parse) if of_one else _read_all(requests, parse)

        async def call(requests: AsyncIterator[bytes], context: Context) -> Any:
            return await behavior(await request(requests, context), context)

        async def generate(requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[Any]:
            async for response in behavior(await request(requests, context), context):
                yield response

        make_handler = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
        return make_handler(
            generate if inspect.isasyncgenfunction(behavior) else call,
            response_serializer=_unless_serialized(handler.response_serializer),
        )

    async def _read_one(self, context: Context, parse: Parse) -> Any:
        try:
            async with asyncio.timeout(MAX_READ_S):
                data = await context.read()
        except TimeoutError:
            reason = f"message: it did not arrive within {MAX_READ_S:g} s"
            raise QueueFullError(reason, RETRY_AFTER_S, "message") from None
        if not isinstance(data, bytes):  # the end of the stream
            raise InvalidArgumentError("message", "missing; send one")
        if len(data) <= LARGE_BYTES:
            return parse_message(data, parse)
        async with self._parsing:
            await asyncio.sleep(0)
            return parse_message(data, parse)


def parse_message(data: bytes, parse: Parse) -> Any:
    """Parses a message. If two fields of a oneof are set, the last one counts.

    Raises:
        InvalidArgumentError: the message does not parse or holds invalid UTF-8.
    """
    try:
        return parse(data)
    except (DecodeError, UnicodeDecodeError) as error:
        raise InvalidArgumentError("message", "not a readable message of this method") from error


async def _read_all(requests: AsyncIterator[bytes], parse: Parse) -> AsyncIterator[Any]:
    async for data in requests:
        yield parse_message(data, parse)


def _unless_serialized(serialize: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
    """Wraps `serialize` to leave bytes alone: a handler serializes large responses in pieces."""
    return lambda response: response if isinstance(response, bytes) else serialize(response)
