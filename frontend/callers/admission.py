"""Admits calls by token, limits a client's open calls and records each call, over gRPC and HTTP."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from frontend.callers.audit import Audit
from frontend.callers.call import Call
from frontend.callers.tenants import Tenant, Tokens
from frontend.callers.tracing import traced
from shared.errors import QueueFullError, UnauthenticatedError
from shared.telemetry.tracing import Tracing

_RETRY_AFTER_S = 1.0


class Admission:
    """Rejects calls without one of `tokens`, and a client's calls beyond `max_requests` at a time,
    or beyond its own limit. Without `tokens`, each host counts as a client."""

    def __init__(
        self,
        tokens: Tokens | None,
        max_requests: int,
        audit: Audit,
        tracing: Tracing | None = None,
    ) -> None:
        self._tokens = tokens
        self._max_requests = max_requests
        self._audit = audit
        self._tracing = tracing
        self._requests: Counter[str] = Counter()

    @property
    def needs_token(self) -> bool:
        return self._tokens is not None

    def client(self, token: str, hint: str) -> Tenant | None:
        """The client that a call's token names, or None if no token is needed.

        Args:
            hint: how a caller sends a token.

        Raises:
            UnauthenticatedError: the token is unknown.
        """
        if self._tokens is None:
            return None
        client = self._tokens.find(token)
        if client is None:
            raise UnauthenticatedError(f"a valid token is required: {hint}")
        return client

    def named(self, name: str) -> Tenant | None:
        """The client of that name, if it still has a token."""
        return self._tokens.named(name) if self._tokens else None

    def recorded(self, call: Call) -> AbstractContextManager[None]:
        """Records a call that is rejected before it is placed."""
        return self._audit.records(call)

    @contextmanager
    def placed(self, call: Call, traceparent: str) -> Iterator[None]:
        """Records a call, and counts it as one of its client's open calls until the context ends.

        Args:
            traceparent: the caller's trace, as W3C's Trace Context writes it; empty: none.

        Raises:
            QueueFullError: the client has too many open calls.
        """
        with self._audit.records(call), traced(self._tracing, call, traceparent):
            caller = call.caller
            self._check_places(caller, call.client)
            self._requests[caller] += 1
            call.has_place = True
            try:
                yield
            finally:
                self.release(call)

    def release(self, call: Call) -> None:
        """Frees a call's place before the call ends, for another that continues its work."""
        if call.has_place:
            call.has_place = False
            self._requests[call.caller] -= 1
            if not self._requests[call.caller]:
                del self._requests[call.caller]

    def _check_places(self, caller: str, client: Tenant | None) -> None:
        limit, name = self._max_requests, "max_requests_per_client"
        if client is not None and client.max_requests is not None:
            limit, name = client.max_requests, "max_requests"
        if self._requests[caller] >= limit:
            raise QueueFullError(f"{name}: {limit} requests are in progress", _RETRY_AFTER_S, name)


def bearer_token(value: str) -> str:
    """The token of an `authorization` header, or an empty text, which no file has."""
    scheme, _, token = value.partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""
