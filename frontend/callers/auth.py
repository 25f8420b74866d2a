"""Decides who may call a public service, by token, and how many calls a client may have open; and
has each call recorded.

Health stays open, for load balancers.
"""

from __future__ import annotations

import hashlib
import inspect
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import grpc
import structlog
from grpc import aio
from grpc_health.v1 import health

from frontend.callers.audit import Audit
from frontend.callers.call import Call
from frontend.callers.door import Door
from frontend.callers.refusals import Refusals
from frontend.callers.tenants import Client, read_clients
from frontend.callers.tracing import AskedTraces, traced
from nano_vllm_grpc.tls import FileError
from shared.errors import (
    InvalidArgumentError,
    PermissionDeniedError,
    QueueFullError,
    ServiceError,
    UnauthenticatedError,
    UnimplementedError,
)
from shared.rpc.callers import CALLER, Caller, network_of
from shared.rpc.interceptors import within, wrap_behavior
from shared.rpc.message_memory import MAX_BYTES_PER_CALLER
from shared.telemetry.tracing import Tracing

log = structlog.get_logger(__name__)

Context = aio.ServicerContext[Any, Any]

_SCHEME = "bearer "
_RETRY_AFTER_S = 1.0
_NOBODY = ""  # the caller of calls that nobody known makes
_OPEN = f"/{health.SERVICE_NAME}/"


class Tokens:
    """The tokens of a file that may change.

    Emptying the file locks everybody out. If it is deleted or broken, nothing changes.

    Raises:
        FileError: the file cannot be used, or holds no token.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._stamp = self._read_stamp()
        self._clients = _by_digest(path)
        if not self._clients:
            raise FileError(f"auth_tokens_file: {path} holds no token")

    def named(self, name: str) -> Client | None:
        """The client of that name, if the file has one."""
        self._reread()
        return next((each for each in self._clients.values() if each.name == name), None)

    def find(self, token: str) -> Client | None:
        """The client whose token this is, or None if it is unknown."""
        self._reread()
        # The time taken tells something about digests at most, which nobody can choose by prefix.
        return self._clients.get(_digest(token))

    def _reread(self) -> None:
        stamp = self._read_stamp()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._clients = _by_digest(self._path)
        except FileError as error:
            log.warning("tokens not reloaded", reason=str(error))
        else:
            log.info("tokens reloaded", tokens=len(self._clients))

    def _read_stamp(self) -> tuple[int, int, int] | None:
        try:
            found = os.stat(self._path)
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino


class ClientInterceptor(aio.ServerInterceptor):
    """Refuses calls without one of `tokens`, and a client's calls beyond `max_requests` at a time,
    or its own limit. Where there are no tokens, a host is a client.

    Args:
        methods: by path, those that are recorded by name.
        operators_methods: paths of those that need one of `operators` in place of a client's
            token; None: nobody may call them.
        door: admits those who call its methods, in place of tokens.
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
        door: Door | None = None,
    ) -> None:
        self._door = door
        self._tracing = tracing
        self._tokens = tokens
        self._operators_methods = frozenset(operators_methods)
        self._operators = operators
        self._max_requests = max_requests
        self._audit = audit
        self._methods = methods
        self._refusals = Refusals()
        self._asked_traces = AskedTraces()
        self._requests: Counter[str] = Counter()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        if handler_call_details.method.startswith(_OPEN):
            return await continuation(handler_call_details)
        method = self._methods.get(handler_call_details.method, "other")
        try:
            client = self._client(handler_call_details)
        except ServiceError as error:
            await self._refusals.wait(_NOBODY)
            return self._refusal(method, error)
        if client is not None:
            CALLER.set(Caller(client.name, client.max_bytes or MAX_BYTES_PER_CALLER))
        handler = await continuation(handler_call_details)
        if handler is None:  # an unknown method
            await self._refusals.wait(client.name if client else _NOBODY)
            return None

        door = (
            self._door if self._door and handler_call_details.method in self._door.methods else None
        )

        def count(behavior: Any) -> Any:
            return self._paced(
                within(behavior, lambda context: self._place(method, context, client, door)),
                client,
            )

        return wrap_behavior(handler, count)

    def _client(self, details: grpc.HandlerCallDetails) -> Client | None:
        """The client that a call's token names; None where none is needed.

        Raises:
            ServiceError: the token does not permit the call.
        """
        token = _bearer_token(details.invocation_metadata)
        if details.method in self._operators_methods:
            return _operator(self._operators, token)
        if self._door and details.method in self._door.methods:
            return self._door.client()
        if self._tokens is None:
            return None
        client = self._tokens.find(token)
        if client is None:
            raise UnauthenticatedError(
                "a valid token is needed: metadata 'authorization: Bearer TOKEN'"
            )
        return client

    def _paced(self, behavior: Any, client: Client | None) -> Any:
        """Has refusals wait, of calls that have let go of everything."""
        if inspect.isasyncgenfunction(behavior):
            return behavior

        async def call(request: Any, context: Context) -> Any:
            try:
                return await behavior(request, context)
            except (InvalidArgumentError, QueueFullError) as error:
                refusal = error.with_traceback(None)
                refusal.__cause__ = refusal.__context__ = None  # whose frames hold the request
            await self._refusals.wait(client.name if client else network_of(context.peer()))
            raise refusal

        return call

    def _refusal(self, method: str, error: ServiceError) -> Any:
        """A kind of method that need not read a message before it answers."""

        async def refuse_call(requests: object, context: object) -> None:
            raise error

        refuse = within(
            refuse_call, lambda context: self._audit.records(Call(method, context.peer()))
        )
        return grpc.stream_stream_rpc_method_handler(refuse, request_deserializer=bytes)

    @contextmanager
    def _place(
        self, method: str, context: Context, client: Client | None, door: Door | None
    ) -> Iterator[None]:
        """Holds one of the client's places for as long as a call takes."""
        call = Call(method, context.peer(), client)
        caller = call.caller
        with (
            self._audit.records(call),
            traced(self._tracing, self._asked_traces, call, context.invocation_metadata()),
        ):
            if door:
                door.check(call.peer)
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


def _by_digest(path: str) -> dict[bytes, Client]:
    return {_digest(token): client for token, client in read_clients(path).items()}


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def _bearer_token(metadata: Any) -> str:
    """The token if there is exactly one `authorization`, else an empty one, which no file holds."""
    values = [value for key, value in metadata or () if key == "authorization"]
    if len(values) != 1 or not isinstance(values[0], str):
        return ""
    value = values[0]
    return value[len(_SCHEME) :].strip() if value.lower().startswith(_SCHEME) else ""
