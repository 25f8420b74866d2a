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
_KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


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
        return within(handler, partial(self.span, handler_call_details.method))


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


def within(handler: Any, span: Callable[[Context], Span]) -> Any:
    """A handler of the same kind, each of whose calls runs inside the context manager from
    `span`."""
    kind = next(each for each in _KINDS if getattr(handler, each) is not None)
    behavior = getattr(handler, kind)

    async def entered(request: Any, context: Context) -> Any:
        async with span(context):
            return await behavior(request, context)

    async def entered_generator(request: Any, context: Context) -> AsyncIterator[Any]:
        async with span(context):
            async for response in behavior(request, context):
                yield response

    make_handler = getattr(grpc, f"{kind}_rpc_method_handler")
    return make_handler(
        entered_generator if inspect.isasyncgenfunction(behavior) else entered,
        request_deserializer=handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )


async def _abort(context: Context, error: ServiceError) -> None:
    await context.abort(error.code, str(error), error.trailing_metadata())
