"""Decides who may call a public service, by token, and how many calls a client may have open; and
has each call recorded.

Health stays open, for load balancers.
"""

from __future__ import annotations

import hashlib
import hmac
import inspect
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import grpc
import structlog
from grpc import aio
from grpc_health.v1 import health

from frontend.audit import Audit
from frontend.call import Call
from frontend.refusals import Refusals
from frontend.tenants import Client, read_clients
from frontend.tracing import traced
from shared.callers import CALLER, Caller, host_of
from shared.errors import (
    InvalidArgumentError,
    PermissionDeniedError,
    QueueFullError,
    UnauthenticatedError,
    UnimplementedError,
)
from shared.interceptors import within, wrap_behavior
from shared.message_memory import MAX_BYTES_PER_CALLER
from shared.tls import FileError
from shared.tracing import Tracing

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
        self._clients = _by_digest(read_clients(path))
        if not self._clients:
            raise FileError(f"auth_tokens_file: {path} holds no token")

    def find(self, token: str) -> Client | None:
        """The client whose token this is, or None if it is unknown."""
        self._reread()
        digest = hashlib.sha256(token.encode()).digest()
        # Compares with each of them, even after a match: the time taken reveals nothing.
        found = [client for known, client in self._clients if hmac.compare_digest(digest, known)]
        return found[0] if found else None

    def _reread(self) -> None:
        stamp = self._read_stamp()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._clients = _by_digest(read_clients(self._path))
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
        operators_methods: paths of those that check an operator's token themselves, and need no
            client's.
    """

    def __init__(
        self,
        tokens: Tokens | None,
        max_requests: int,
        audit: Audit,
        methods: Mapping[str, str],
        operators_methods: Collection[str] = (),
        tracing: Tracing | None = None,
    ) -> None:
        self._tracing = tracing
        self._tokens = tokens
        self._operators_methods = frozenset(operators_methods)
        self._max_requests = max_requests
        self._audit = audit
        self._methods = methods
        self._refusals = Refusals()
        self._requests: Counter[str] = Counter()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        if handler_call_details.method.startswith(_OPEN):
            return await continuation(handler_call_details)
        method = self._methods.get(handler_call_details.method, "other")
        client = None
        operators = handler_call_details.method in self._operators_methods
        if self._tokens is not None and not operators:
            client = self._tokens.find(_bearer_token(handler_call_details.invocation_metadata))
            if client is None:
                await self._refusals.wait(_NOBODY)
                return self._refusal(method)
            CALLER.set(Caller(client.name, client.max_bytes or MAX_BYTES_PER_CALLER))
        handler = await continuation(handler_call_details)
        if handler is None:  # an unknown method
            await self._refusals.wait(client.name if client else _NOBODY)
            return None

        def count(behavior: Any) -> Any:
            return self._paced(
                within(behavior, lambda context: self._place(method, context, client)),
                client,
            )

        return wrap_behavior(handler, count)

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
            await self._refusals.wait(client.name if client else host_of(context.peer()))
            raise refusal

        return call

    def _refusal(self, method: str) -> Any:
        """A kind of method that need not read a message before it answers."""
        refuse = within(_refuse, lambda context: self._audit.records(Call(method, context.peer())))
        return grpc.stream_stream_rpc_method_handler(refuse, request_deserializer=bytes)

    @contextmanager
    def _place(self, method: str, context: Context, client: Client | None) -> Iterator[None]:
        """Holds one of the client's places for as long as a call takes."""
        call = Call(method, context.peer(), client)
        caller = call.caller
        with (
            self._audit.records(call),
            traced(self._tracing, call, context.invocation_metadata()),
        ):
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


def check_operator(operators: Tokens | None, context: Context) -> None:
    """Checks that a call comes from one of `operators`; None: there are none.

    Raises:
        UnimplementedError: there are none.
        PermissionDeniedError: it does not.
    """
    if operators is None:
        raise UnimplementedError(
            "off: it needs an operator's token, and operator_tokens_file is unset"
        )
    if operators.find(_bearer_token(context.invocation_metadata())) is None:
        raise PermissionDeniedError(
            "needs an operator's token: metadata 'authorization: Bearer TOKEN'"
        )


async def _refuse(requests: object, context: object) -> None:
    raise UnauthenticatedError("a valid token is needed: metadata 'authorization: Bearer TOKEN'")


def _by_digest(clients: Mapping[str, Client]) -> tuple[tuple[bytes, Client], ...]:
    return tuple(
        (hashlib.sha256(token.encode()).digest(), client) for token, client in clients.items()
    )


def _bearer_token(metadata: Any) -> str:
    """The token if there is exactly one `authorization`, else an empty one, which no file holds."""
    values = [value for key, value in metadata or () if key == "authorization"]
    if len(values) != 1 or not isinstance(values[0], str):
        return ""
    value = values[0]
    return value[len(_SCHEME) :].strip() if value.lower().startswith(_SCHEME) else ""
