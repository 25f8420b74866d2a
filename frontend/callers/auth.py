"""Admits calls to a public service by token, limits how many calls a client may have open, and has
each call recorded.

Health stays open, for load balancers.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
from grpc import aio
from grpc_health.v1 import health

from frontend.callers.audit import Audit
from frontend.callers.call import Call
from frontend.callers.gateway import GatewayAddress
from frontend.callers.rates import CallerRates
from frontend.callers.tenants import Client, Tokens
from frontend.callers.tracing import ASKED_PER_SECOND, traced
from shared.errors import (
    InvalidArgumentError,
    PermissionDeniedError,
    QueueFullError,
    ServiceError,
    UnauthenticatedError,
    UnimplementedError,
)
from shared.rpc.callers import CALLER, Caller, network_of
from shared.rpc.interceptors import Context, within, wrap_behavior
from shared.rpc.message_memory import MAX_BYTES_PER_CALLER
from shared.telemetry.tracing import Tracing

_SCHEME = "bearer "
_RETRY_AFTER_S = 1.0
_ANONYMOUS = ""  # the caller of calls without a good token
# Refusals per second that a caller gets at once, after as many in a burst. The next ones wait, but
# no more than so many: a caller that has them all open may as well have its answers.
_REFUSALS_PER_SECOND = 50.0
_MAX_WAITING_REFUSALS = 128
_OPEN = f"/{health.SERVICE_NAME}/"


class ClientInterceptor(aio.ServerInterceptor):
    """Refuses calls without one of `tokens`, and a client's calls beyond `max_requests` at a time,
    or its own limit. Where there are no tokens, a host is a client.

    Args:
        methods: by path, those that are recorded by name.
        operators_methods: paths of those that need one of `operators` in place of a client's
            token; None: nobody may call them.
        gateway: admits those who call its methods, in place of tokens.
    """

    def __init__(
        self,
        tokens: Tokens | None,
        max_requests: int,
        audit: Audit,
        methods: Mapping[str, str],
        operators_methods: Collection[str] = (),
        operators: Tokens | None = None,
        tracing: Tracing | None = None,
        gateway: GatewayAddress | None = None,
    ) -> None:
        self._gateway = gateway
        self._tracing = tracing
        self._tokens = tokens
        self._operators_methods = frozenset(operators_methods)
        self._operators = operators
        self._max_requests = max_requests
        self._audit = audit
        self._methods = methods
        max_delay_s = _MAX_WAITING_REFUSALS / _REFUSALS_PER_SECOND
        self._refusals = CallerRates(_REFUSALS_PER_SECOND, max_delay_s)
        self._asked_traces = CallerRates(ASKED_PER_SECOND)
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
            await self._space_refusal(_ANONYMOUS)
            return self._refusal(path, error)
        if client is not None:
            CALLER.set(Caller(client.name, client.max_bytes or MAX_BYTES_PER_CALLER))
        handler = await continuation(handler_call_details)
        if handler is None:  # an unknown method
            await self._space_refusal(client.name if client else _ANONYMOUS)
            return None

        def counted(behavior: Any) -> Any:
            return within(behavior, lambda context: self._place(path, context, client))

        return wrap_behavior(handler, lambda behavior: self._paced(counted(behavior), client))

    def _client(self, details: grpc.HandlerCallDetails) -> Client | None:
        """The client that a call's token names; None where none is needed.

        Raises:
            ServiceError: the token does not permit the call.
        """
        token = _bearer_token(details.invocation_metadata)
        if details.method in self._operators_methods:
            return _operator(self._operators, token)
        if self._gateway and details.method in self._gateway.methods:
            return self._gateway.client()
        if self._tokens is None:
            return None
        client = self._tokens.find(token)
        if client is None:
            raise UnauthenticatedError(
                "a valid token is needed: metadata 'authorization: Bearer TOKEN'"
            )
        return client

    def _paced(self, behavior: Any, client: Client | None) -> Any:
        """Spaces refusals, for which a call has given back all that it held."""
        if inspect.isasyncgenfunction(behavior):
            return behavior

        async def call(request: Any, context: Context) -> Any:
            try:
                return await behavior(request, context)
            except (InvalidArgumentError, QueueFullError) as error:
                refusal = error.with_traceback(None)
                refusal.__cause__ = refusal.__context__ = None  # whose frames hold the request
            await self._space_refusal(client.name if client else network_of(context.peer()))
            raise refusal

        return call

    async def _space_refusal(self, caller: str) -> None:
        """Returns when `caller` may learn that its call is refused."""
        delay_s = self._refusals.delay_s(caller, asyncio.get_running_loop().time())
        if delay_s:
            await asyncio.sleep(delay_s)

    def _refusal(self, path: str, error: ServiceError) -> Any:
        """A kind of method that need not read a message before it answers."""

        async def refuse(_: object, context: Context) -> None:
            with self._audit.records(self._call(path, context)):
                raise error

        return grpc.stream_stream_rpc_method_handler(refuse, request_deserializer=bytes)

    def _call(self, path: str, context: Context, client: Client | None = None) -> Call:
        return Call(self._methods.get(path, "other"), context.peer(), client)

    @asynccontextmanager
    async def _place(
        self, path: str, context: Context, client: Client | None
    ) -> AsyncIterator[None]:
        """Holds one of the client's places for as long as a call takes."""
        call = self._call(path, context, client)
        caller = call.caller
        with (
            self._audit.records(call),
            traced(self._tracing, self._asked_traces, call, context.invocation_metadata()),
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

    def _check_places(self, caller: str, client: Client | None) -> None:
        limit, name = self._max_requests, "max_requests_per_client"
        if client is not None and client.max_requests is not None:
            limit, name = client.max_requests, "max_requests"
        if self._requests[caller] >= limit:
            raise QueueFullError(f"{name}: {limit} requests are in progress", _RETRY_AFTER_S)


def _operator(operators: Tokens | None, token: str) -> Client:
    """The operator whose token this is, under a name that no client has: no name has a colon.

    Raises:
        UnimplementedError: there are no operators.
        PermissionDeniedError: it is none's.
    """
    if operators is None:
        raise UnimplementedError(
            "off: it needs an operator's token, and operator_tokens_file is unset"
        )
    if (operator := operators.find(token)) is None:
        raise PermissionDeniedError(
            "needs an operator's token: metadata 'authorization: Bearer TOKEN'"
        )
    return replace(operator, name=f"operator:{operator.name}")


def _bearer_token(metadata: Any) -> str:
    """The token if there is exactly one `authorization`, else an empty one, which no file holds."""
    values = [value for key, value in metadata or () if key == "authorization"]
    if len(values) != 1 or not isinstance(values[0], str):
        return ""
    value = values[0]
    return value[len(_SCHEME) :].strip() if value.lower().startswith(_SCHEME) else ""
