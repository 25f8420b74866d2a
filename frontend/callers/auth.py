"""Admits calls to a public service by token, limits a client's open calls and records each call.

The health service needs no token, so that load balancers can use it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import grpc
from grpc import aio
from grpc_health.v1 import health

from frontend.callers.audit import Audit
from frontend.callers.call import Call
from frontend.callers.gateway import GatewayAddress
from frontend.callers.tenants import Tenant, Tokens
from frontend.callers.tracing import traced
from shared.errors import (
    QueueFullError,
    ServiceError,
    UnauthenticatedError,
)
from shared.rpc.interceptors import Context, Span, within, wrap_behavior
from shared.telemetry.tracing import Tracing

_SCHEME = "bearer "
_RETRY_AFTER_S = 1.0
_OPEN = f"/{health.SERVICE_NAME}/"


class ClientInterceptor(aio.ServerInterceptor):
    """Rejects calls without one of `tokens`, and a client's calls beyond `max_requests` at a time,
    or beyond its own limit. Without `tokens`, each host counts as a client.

    Args:
        methods: names of the methods that are recorded by name, by path.
        gateway: admits callers of its methods, instead of tokens.
    """

    def __init__(
        self,
        tokens: Tokens | None,
        max_requests: int,
        audit: Audit,
        methods: Mapping[str, str],
        tracing: Tracing | None = None,
        gateway: GatewayAddress | None = None,
    ) -> None:
        self._gateway = gateway
        self._tracing = tracing
        self._tokens = tokens
        self._max_requests = max_requests
        self._audit = audit
        self._methods = methods
        self._requests: Counter[str] = Counter()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        path = handler_call_details.method
        if path.startswith(_OPEN):
            return await continuation(handler_call_details)
        try:
            client = self._client(handler_call_details)
        except ServiceError as error:
            return self._rejection(path, error)
        handler = await continuation(handler_call_details)
        if handler is None:
            return None  # an unknown method

        def place(context: Context) -> Span:
            return self._place(path, context, client)

        return wrap_behavior(handler, lambda behavior: within(behavior, place))

    def _client(self, details: grpc.HandlerCallDetails) -> Tenant | None:
        """The client that a call's token names, or None if no token is needed.

        Raises:
            ServiceError: the token does not permit the call.
        """
        token = _bearer_token(details.invocation_metadata)
        if self._gateway and details.method in self._gateway.methods:
            return self._gateway.client()
        if self._tokens is None:
            return None
        client = self._tokens.find(token)
        if client is None:
            raise UnauthenticatedError(
                "a valid token is required: metadata 'authorization: Bearer TOKEN'"
            )
        return client

    def _rejection(self, path: str, error: ServiceError) -> Any:
        """A handler that raises `error`, of a kind that need not read a message first."""

        async def reject(_: object, context: Context) -> None:
            with self._audit.records(self._call(path, context)):
                raise error

        return grpc.stream_stream_rpc_method_handler(reject, request_deserializer=bytes)

    def _call(self, path: str, context: Context, client: Tenant | None = None) -> Call:
        return Call(self._methods.get(path, "other"), context.peer(), client)

    @asynccontextmanager
    async def _place(
        self, path: str, context: Context, client: Tenant | None
    ) -> AsyncIterator[None]:
        """Counts a call as one of the client's open calls until the context ends."""
        call = self._call(path, context, client)
        caller = call.caller
        with (
            self._audit.records(call),
            traced(self._tracing, call, context.invocation_metadata()),
        ):
            if self._gateway and path in self._gateway.methods:
                self._gateway.check(call.peer)
            self._check_places(caller, client)
            self._requests[caller] += 1
            try:
                yield
            finally:
                self._requests[caller] -= 1
                if not self._requests[caller]:
                    del self._requests[caller]

    def _check_places(self, caller: str, client: Tenant | None) -> None:
        limit, name = self._max_requests, "max_requests_per_client"
        if client is not None and client.max_requests is not None:
            limit, name = client.max_requests, "max_requests"
        if self._requests[caller] >= limit:
            raise QueueFullError(f"{name}: {limit} requests are in progress", _RETRY_AFTER_S, name)


def _bearer_token(metadata: Any) -> str:
    """The token if there is exactly one `authorization`, else an empty text, which no file has."""
    values = [value for key, value in metadata or () if key == "authorization"]
    if len(values) != 1 or not isinstance(values[0], str):
        return ""
    value = values[0]
    return value[len(_SCHEME) :].strip() if value.lower().startswith(_SCHEME) else ""
