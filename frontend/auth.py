"""Decides who may call a public service, by token, and how many calls a client may have open.

Health stays open, for load balancers.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import structlog
from grpc import aio
from grpc_health.v1 import health

from shared.callers import host_of
from shared.errors import QueueFullError, UnauthenticatedError
from shared.interceptors import within, wrap_behavior
from shared.tls import FileError

log = structlog.get_logger(__name__)

Context = aio.ServicerContext[Any, Any]

_SCHEME = "bearer "
_MIN_TOKEN_LENGTH = 16
_RETRY_AFTER_S = 1.0
_OPEN = f"/{health.SERVICE_NAME}/"


def read_tokens(path: str) -> tuple[str, ...]:
    """Reads one token per line, skipping empty lines and those that begin with `#`.

    Raises:
        FileError: the file cannot be read, or a line cannot be a token; the message gives the
            line's number, never its text.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(f"auth_tokens_file: cannot read {path}: {error}") from error
    tokens = []
    for number, line in enumerate(map(str.strip, lines), start=1):
        if not line or line.startswith("#"):
            continue
        if not re.fullmatch(f"[!-~]{{{_MIN_TOKEN_LENGTH},}}", line):
            raise FileError(
                f"auth_tokens_file: line {number} of {path} is not a token: at least "
                f"{_MIN_TOKEN_LENGTH} printable ASCII characters, no spaces"
            )
        tokens.append(line)
    return tuple(tokens)


class Tokens:
    """The tokens of a file that may change.

    Emptying the file locks everybody out. If it is deleted or broken, nothing changes.

    Raises:
        FileError: the file cannot be used, or holds no token.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._stamp = self._read_stamp()
        self._digests = _digests(read_tokens(path))
        if not self._digests:
            raise FileError(f"auth_tokens_file: {path} holds no token")

    def find(self, token: str) -> bytes | None:
        """The token's digest, or None if it is unknown."""
        self._reread()
        digest = hashlib.sha256(token.encode()).digest()
        # Compares with each of them, even after a match: the time taken reveals nothing.
        equal = [hmac.compare_digest(digest, known) for known in self._digests]
        return digest if any(equal) else None

    def _reread(self) -> None:
        stamp = self._read_stamp()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._digests = _digests(read_tokens(self._path))
        except FileError as error:
            log.warning("tokens not reloaded", reason=str(error))
        else:
            log.info("tokens reloaded", tokens=len(self._digests))

    def _read_stamp(self) -> tuple[int, int, int] | None:
        try:
            found = os.stat(self._path)
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino


class ClientInterceptor(aio.ServerInterceptor):
    """Refuses calls without one of `tokens`, and a client's calls beyond `max_requests` at a time.
    A client is a token or, if there are none, a host."""

    def __init__(self, tokens: Tokens | None, max_requests: int) -> None:
        self._tokens = tokens
        self._max_requests = max_requests
        self._requests: Counter[object] = Counter()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        if handler_call_details.method.startswith(_OPEN):
            return await continuation(handler_call_details)
        client = None
        if self._tokens is not None:
            client = self._tokens.find(_bearer_token(handler_call_details.invocation_metadata))
            if client is None:
                return _REFUSAL
        handler = await continuation(handler_call_details)

        def count(behavior: Any) -> Any:
            return within(behavior, lambda context: self._place(client or host_of(context.peer())))

        return handler and wrap_behavior(handler, count)

    @contextmanager
    def _place(self, client: object) -> Iterator[None]:
        """Holds one of the client's places for as long as a call takes."""
        if self._requests[client] >= self._max_requests:
            raise QueueFullError(
                f"max_requests_per_client: {self._max_requests} requests are in progress",
                _RETRY_AFTER_S,
            )
        self._requests[client] += 1
        try:
            yield
        finally:
            self._requests[client] -= 1
            if not self._requests[client]:
                del self._requests[client]


async def _refuse(requests: object, context: object) -> None:
    raise UnauthenticatedError("a valid token is needed: metadata 'authorization: Bearer TOKEN'")


# A kind of method that need not read a message before it answers.
_REFUSAL: Any = grpc.stream_stream_rpc_method_handler(_refuse, request_deserializer=bytes)


def _digests(tokens: tuple[str, ...]) -> tuple[bytes, ...]:
    return tuple(hashlib.sha256(token.encode()).digest() for token in tokens)


def _bearer_token(metadata: Any) -> str:
    """The token if there is exactly one `authorization`, else an empty one, which no file holds."""
    values = [value for key, value in metadata or () if key == "authorization"]
    if len(values) != 1 or not isinstance(values[0], str):
        return ""
    value = values[0]
    return value[len(_SCHEME) :].strip() if value.lower().startswith(_SCHEME) else ""
