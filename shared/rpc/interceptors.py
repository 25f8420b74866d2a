"""Server interceptors that span calls; one of them turns exceptions into gRPC statuses."""

from __future__ import annotations

import asyncio
import inspect
import traceback
from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any

import grpc
import structlog
from grpc import aio

from shared.errors import InternalError, ServiceError

log = structlog.get_logger(__name__)

Context = aio.ServicerContext[Any, Any]
Span = AbstractAsyncContextManager[None]


class SpanInterceptor(aio.ServerInterceptor):
    """Runs each call of a method that the server has inside the context manager `span`."""

    @abstractmethod
    def span(self, method: str, context: Context) -> Span:
        """The context manager for a call of `method`, which is the path of an RPC."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return None  # an unknown method
        span = partial(self.span, handler_call_details.method)
        return wrap_behavior(handler, lambda behavior: within(behavior, span))


class StatusInterceptor(SpanInterceptor):
    """Answers a `ServiceError` with its own status. Any other exception is logged, and the caller
    receives INTERNAL with only the text "internal error"."""

    @asynccontextmanager
    async def span(self, method: str, context: Context) -> AsyncIterator[None]:
        try:
            yield
        except aio.AbortError:
            raise
        except aio.InternalError:
            # The caller is gone, so no status can be written.
            raise asyncio.CancelledError from None
        except ServiceError as error:
            # Else the request would live until the garbage collector runs.
            traceback.clear_frames(error.__traceback__)
            await _abort(context, error)
        except Exception as error:
            log.error("rpc failed", method=method, exc_info=error)
            await _abort(context, InternalError("internal error"))


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


def within(behavior: Any, span: Callable[[Context], Span]) -> Any:
    """Wraps `behavior` so that each call runs inside the context manager from `span`."""

    async def entered(request: Any, context: Context) -> Any:
        async with span(context):
            return await behavior(request, context)

    async def entered_generator(request: Any, context: Context) -> AsyncIterator[Any]:
        async with span(context):
            async for response in behavior(request, context):
                yield response

    return entered_generator if inspect.isasyncgenfunction(behavior) else entered


async def _abort(context: Context, error: ServiceError) -> None:
    await context.abort(error.code, str(error), error.trailing_metadata())
