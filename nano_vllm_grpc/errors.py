"""The exceptions that the client raises.

    LLMError
    ├── InvalidRequestError    INVALID_ARGUMENT     `violations`: which field, and why
    ├── QueueFullError         RESOURCE_EXHAUSTED   `retry_after_s`: when to retry, if known
    ├── UnavailableError       UNAVAILABLE          no server there, no engine ready, or call cut;
    │                                               `retry_after_s`: when to retry, if known
    ├── DeadlineError          DEADLINE_EXCEEDED
    ├── RequestCancelledError  CANCELLED            by the server, or on the way
    ├── UnauthenticatedError   UNAUTHENTICATED
    ├── ServerError            any other code
    └── StackError             no code              a private stack did not start

`code` is the gRPC status code, and the message is the server's.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TypeVar

import grpc
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2
from grpc import aio

Detail = TypeVar("Detail", bound=Message)


class LLMError(Exception):
    """Base of all the client's errors."""

    def __init__(self, message: str, code: grpc.StatusCode | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.code = code

    def __str__(self) -> str:
        return f"{self.code.name}: {self.message}" if self.code else self.message


class InvalidRequestError(LLMError):
    """The request is wrong. `violations` pairs each bad field's path with what is wrong with it.
    Change these fields."""

    def __init__(self, message: str, violations: tuple[tuple[str, str], ...] = ()) -> None:
        super().__init__(message, grpc.StatusCode.INVALID_ARGUMENT)
        self.violations = violations


class QueueFullError(LLMError):
    """The server accepts no more requests for now. The attribute `retry_after_s`, in seconds, is
    set if the server said when to retry. Send fewer requests, or try again later."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message, grpc.StatusCode.RESOURCE_EXHAUSTED)
        self.retry_after_s = retry_after_s


class UnavailableError(LLMError):
    """Nothing listens at the address, the server there has no engine ready, or the connection was
    cut. The attribute `retry_after_s`, in seconds, is set if the server said when to retry. Try
    again once the server is back."""

    def __init__(
        self, message: str, code: grpc.StatusCode, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message, code)
        self.retry_after_s = retry_after_s


class DeadlineError(LLMError):
    """The call's `timeout_s` has passed. Allow more time, or ask for fewer tokens."""


class RequestCancelledError(LLMError):
    """The server, or a proxy on the way, canceled the request. It may be sent again."""


class UnauthenticatedError(LLMError):
    """The server requires a valid token. Set `token` or NANO_TOKEN."""


class ServerError(LLMError):
    """The server ended the call with another status, `code`. The message or the server's log says
    why."""


class StackError(LLMError):
    """A private stack did not start. The launcher's message says why."""


_BY_CODE: dict[grpc.StatusCode, type[LLMError]] = {
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineError,
    grpc.StatusCode.CANCELLED: RequestCancelledError,
    grpc.StatusCode.UNAUTHENTICATED: UnauthenticatedError,
}


# The beginning of gRPC's own message, by code, if something on the way cut a stream. A server that
# dies is UNAVAILABLE ("Stream removed (Socket closed)", "Cancelling all calls").
_CUTS = {
    # A call that reached a server just as it began to drain. A call that this client itself cancels
    # never gets here.
    grpc.StatusCode.CANCELLED: "CANCELLED",
    grpc.StatusCode.INTERNAL: "Received RST_STREAM",
    grpc.StatusCode.UNKNOWN: "Stream removed",
}


def _detail(error: aio.AioRpcError, detail: Detail) -> Detail | None:
    """Fills in a call's google.rpc detail of this type. Returns None if the call has none."""
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin" and isinstance(value, bytes):
            # Details are optional. The code and the message suffice without them.
            with suppress(DecodeError):
                for packed in status_pb2.Status.FromString(value).details:
                    if packed.Unpack(detail):
                        return detail
    return None


def from_rpc_error(error: aio.AioRpcError, address: str) -> LLMError:
    """The client's exception for a failed call to `address`."""
    code, message = error.code(), error.details() or "no message"
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        bad_request = _detail(error, error_details_pb2.BadRequest())
        violations = bad_request.field_violations if bad_request else ()
        return InvalidRequestError(message, tuple((v.field, v.description) for v in violations))
    retry = _detail(error, error_details_pb2.RetryInfo())
    retry_after_s = retry.retry_delay.ToMilliseconds() / 1000 if retry else None
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return QueueFullError(message, retry_after_s)
    if code is grpc.StatusCode.UNAVAILABLE or (code in _CUTS and message.startswith(_CUTS[code])):
        return UnavailableError(f"{address}: {message}", code, retry_after_s)
    return _BY_CODE.get(code, ServerError)(message, code)
