"""The server interceptor of all services, which turns unreadable messages and exceptions into gRPC
statuses."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import grpc
import structlog
from google.protobuf import empty_pb2
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet
from grpc import aio

from shared.errors import InternalError, InvalidArgumentError, ServiceError

log = structlog.get_logger(__name__)

Deserializer = Callable[[bytes], Any]


@dataclass(frozen=True)
class _Unreadable:
    """Stands in for a message that could not be read, until the handler is called."""

    error: InvalidArgumentError


class StatusInterceptor(aio.ServerInterceptor):
    """Answers INVALID_ARGUMENT to messages that do not parse, exceed `max_message_bytes` or set two
    fields of a oneof; a `ServiceError` with its own status; and any other exception, which is
    logged, with INTERNAL and nothing more than "internal error"."""

    def __init__(self, max_message_bytes: int) -> None:
        self._max_message_bytes = max_message_bytes

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler: Any = await continuation(handler_call_details)
        if handler is None or handler.request_deserializer is None:
            return handler  # an unknown method
        method, streaming = handler_call_details.method, handler.request_streaming

        def guard(behavior: Any) -> Any:
            make = _guard_generator if inspect.isasyncgenfunction(behavior) else _guard
            return make(behavior, method, streaming)

        return wrap_behavior(handler, guard, self._readable(handler.request_deserializer))

    def _readable(self, deserialize: Deserializer) -> Deserializer:
        def decode(data: bytes) -> Any:
            try:
                return decode_message(data, deserialize, self._max_message_bytes)
            except InvalidArgumentError as error:
                return _Unreadable(error)

        return decode


def wrap_behavior(
    handler: Any, wrap: Callable[[Any], Any], deserialize: Deserializer | None = None
) -> Any:
    """A handler of the same kind as `handler`, with its behaviour wrapped in `wrap`."""
    kinds = (
        ("unary_unary", grpc.unary_unary_rpc_method_handler),
        ("unary_stream", grpc.unary_stream_rpc_method_handler),
        ("stream_unary", grpc.stream_unary_rpc_method_handler),
        ("stream_stream", grpc.stream_stream_rpc_method_handler),
    )
    for name, make_handler in kinds:
        behavior = getattr(handler, name)
        if behavior is not None:
            return make_handler(
                wrap(behavior),
                request_deserializer=deserialize or handler.request_deserializer,
                response_serializer=handler.response_serializer,
            )
    return handler


def within(
    behavior: Any, enter: Callable[[aio.ServicerContext[Any, Any]], AbstractContextManager[None]]
) -> Any:
    """Wraps `behavior` so that each call runs inside the context manager from `enter`."""

    async def entered(request: Any, context: aio.ServicerContext[Any, Any]) -> Any:
        with enter(context):
            return await behavior(request, context)

    async def entered_generator(
        request: Any, context: aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[Any]:
        with enter(context):
            async for response in behavior(request, context):
                yield response

    return entered_generator if inspect.isasyncgenfunction(behavior) else entered


def decode_message(data: bytes, deserialize: Deserializer, max_bytes: int) -> Any:
    """Parses one message.

    Raises:
        InvalidArgumentError: it is too large, does not parse, holds invalid UTF-8, or sets more
            than one field of a oneof (protobuf itself would silently keep the last).
    """
    if len(data) > max_bytes:
        raise InvalidArgumentError("message", f"{len(data)} bytes; the limit is {max_bytes}")
    try:
        message = deserialize(data)
    except (DecodeError, UnicodeDecodeError) as error:
        raise InvalidArgumentError("message", "not a readable message of this method") from error
    if isinstance(message, Message):
        _check_oneofs(message, data)
    return message


def _check_oneofs(message: Message, data: bytes) -> None:
    oneofs = [o for o in message.DESCRIPTOR.oneofs if len(o.fields) > 1]
    if not oneofs:
        return
    # Parsed as a message without fields, every field is unknown: that shows what the wire has set.
    unread: Any = UnknownFieldSet(empty_pb2.Empty.FromString(data))
    on_the_wire = {field.field_number for field in unread}
    for oneof in oneofs:
        names = [f.name for f in oneof.fields if f.number in on_the_wire]
        if len(names) > 1:
            raise InvalidArgumentError(oneof.name, f"{' and '.join(names)} are set; give one")


def _guard(behavior: Any, method: str, streaming: bool) -> Any:
    async def guarded(request: Any, context: aio.ServicerContext[Any, Any]) -> Any:
        try:
            return await behavior(_readable_request(request, streaming), context)
        except Exception as error:
            await _abort(context, method, error)

    return guarded


def _guard_generator(behavior: Any, method: str, streaming: bool) -> Any:
    async def guarded(request: Any, context: aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        try:
            async for response in behavior(_readable_request(request, streaming), context):
                yield response
        except Exception as error:
            await _abort(context, method, error)

    return guarded


def _readable_request(request: Any, streaming: bool) -> Any:
    if streaming:
        return _readable_requests(request)
    if isinstance(request, _Unreadable):
        raise request.error
    return request


async def _readable_requests(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        if isinstance(request, _Unreadable):
            raise request.error
        yield request


async def _abort(context: aio.ServicerContext[Any, Any], method: str, error: Exception) -> None:
    if isinstance(error, aio.AbortError | asyncio.CancelledError):
        raise error
    if isinstance(error, aio.InternalError):
        raise asyncio.CancelledError  # not even a status can be written: the caller is gone
    if not isinstance(error, ServiceError):
        log.error("rpc failed", method=method, exc_info=error)
        error = InternalError("internal error")
    await context.abort(error.code, str(error), error.trailing_metadata())
