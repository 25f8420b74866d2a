"""The server interceptor of all services that turns exceptions into gRPC statuses."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager
from typing import Any

import grpc
import structlog
from grpc import aio

from shared.errors import InternalError, ServiceError

log = structlog.get_logger(__name__)


class StatusInterceptor(aio.ServerInterceptor):
    """Answers a `ServiceError` with its own status; and any other exception, which is logged, with
    INTERNAL and nothing more than "internal error"."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return handler  # an unknown method
        method = handler_call_details.method

        def guard(behavior: Any) -> Any:
            make = _guard_generator if inspect.isasyncgenfunction(behavior) else _guard
            return make(behavior, method)

        return wrap_behavior(handler, guard)


def wrap_behavior(handler: Any, wrap: Callable[[Any], Any]) -> Any:
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
                request_deserializer=handler.request_deserializer,
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


def _guard(behavior: Any, method: str) -> Any:
    async def guarded(request: Any, context: aio.ServicerContext[Any, Any]) -> Any:
        try:
            return await behavior(request, context)
        except Exception as error:
            await _abort(context, method, error)

    return guarded


def _guard_generator(behavior: Any, method: str) -> Any:
    async def guarded(request: Any, context: aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        try:
            async for response in behavior(request, context):
                yield response
        except Exception as error:
            await _abort(context, method, error)

    return guarded


async def _abort(context: aio.ServicerContext[Any, Any], method: str, error: Exception) -> None:
    if isinstance(error, aio.AbortError | asyncio.CancelledError):
        raise error
    if isinstance(error, aio.InternalError):
        raise asyncio.CancelledError  # not even a status can be written: the caller is gone
    if not isinstance(error, ServiceError):
        log.error("rpc failed", method=method, exc_info=error)
        error = InternalError("internal error")
    await context.abort(error.code, str(error), error.trailing_metadata())
