"""Admits gRPC calls before their messages are read.

The health service needs no token, so that load balancers can use it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
from grpc import aio
from grpc_health.v1 import health

from frontend.callers.admission import Admission, bearer_token
from frontend.callers.call import Call
from nano_vllm_grpc.pb import frontend_pb2 as pb
from shared.errors import ServiceError
from shared.rpc.interceptors import Context, within

_OPEN = f"/{health.SERVICE_NAME}/"
_SERVICE = pb.DESCRIPTOR.services_by_name["InferenceService"]


class ClientInterceptor(aio.ServerInterceptor):
    """Has `admission` decide about each call."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        path = handler_call_details.method
        if path.startswith(_OPEN):
            return await continuation(handler_call_details)
        service, _, method = path.removeprefix("/").rpartition("/")
        if service != _SERVICE.full_name or method not in _SERVICE.methods_by_name:
            method = "other"
        token = _bearer_token(handler_call_details.invocation_metadata)
        try:
            client = self._admission.client(token, "metadata 'authorization: Bearer TOKEN'")
        except ServiceError as error:
            return self._rejection(method, error)
        handler = await continuation(handler_call_details)
        if handler is None:
            return None  # an unknown method

        @asynccontextmanager
        async def place(context: Context) -> AsyncIterator[None]:
            call = Call(method, context.peer(), client)
            metadata = context.invocation_metadata() or ()
            traceparent = next((value for key, value in metadata if key == "traceparent"), "")
            with self._admission.placed(call, str(traceparent)):
                yield

        return within(handler, place)

    def _rejection(self, method: str, error: ServiceError) -> Any:
        """A handler that raises `error`, of a kind that need not read a message first."""

        async def reject(_: object, context: Context) -> None:
            with self._admission.recorded(Call(method, context.peer())):
                raise error

        return grpc.stream_stream_rpc_method_handler(reject, request_deserializer=bytes)


def _bearer_token(metadata: Any) -> str:
    """The token if there is exactly one `authorization`, else an empty text, which no file has."""
    values = [value for key, value in metadata or () if key == "authorization"]
    return bearer_token(values[0]) if len(values) == 1 and isinstance(values[0], str) else ""
