"""Errors that a client may see, each with its gRPC status.

    ServiceError
    ├── InvalidArgumentError     INVALID_ARGUMENT     names the field and the limit (BadRequest)
    ├── NotFoundError            NOT_FOUND            this server lacks the service (health)
    ├── FailedPreconditionError  FAILED_PRECONDITION  a stale or misplaced step
    ├── QueueFullError           RESOURCE_EXHAUSTED   says when to retry (RetryInfo)
    ├── UnauthenticatedError     UNAUTHENTICATED      no valid token came with the call
    ├── PermissionDeniedError    PERMISSION_DENIED    the caller may not call this method
    ├── OutOfRangeError          OUT_OF_RANGE         a position in a stream that is no longer kept
    ├── DataLossError            DATA_LOSS            a stream's reader fell behind; begin again
    ├── StreamEndedError         ABORTED              this process ends a stream; open another
    ├── UnimplementedError       UNIMPLEMENTED        this model or stack lacks the method
    ├── UnavailableError         UNAVAILABLE          no engine is ready (RetryInfo if soon)
    ├── DeadlineError            DEADLINE_EXCEEDED
    └── InternalError            INTERNAL             what happened is in the log, not in the reply

Raise an error where the fault is known. Only `rpc.interceptors` translates errors to statuses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc import aio

Metadata = tuple[tuple[str, str | bytes], ...]
Detail = TypeVar("Detail", bound=Message)
_DETAILS = "grpc-status-details-bin"  # the standard trailer
RETRY_AFTER_S = 1.0  # if no service knows when there will be room


class ServiceError(Exception):
    """Base of all errors with a gRPC status; the client reads the message."""

    code: grpc.StatusCode = grpc.StatusCode.INTERNAL

    def details(self) -> Sequence[Message]:
        """google.rpc error details to send along."""
        return ()

    def trailing_metadata(self) -> Metadata:
        """The trailer with the details, or nothing if there are none."""
        details = self.details()
        if not details:
            return ()
        status = status_pb2.Status(code=self.code.value[0], message=str(self))
        for detail in details:
            packed = any_pb2.Any()
            packed.Pack(detail)
            status.details.append(packed)
        return ((_DETAILS, status.SerializeToString()),)


class InvalidArgumentError(ServiceError):
    """A field of the request is wrong; `field` is its path in the message."""

    code = grpc.StatusCode.INVALID_ARGUMENT

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.reason = message

    def details(self) -> Sequence[Message]:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=self.field, description=self.reason
        )
        return (error_details_pb2.BadRequest(field_violations=[violation]),)


class FailedPreconditionError(ServiceError):
    code = grpc.StatusCode.FAILED_PRECONDITION


class NotFoundError(ServiceError):
    code = grpc.StatusCode.NOT_FOUND


class QueueFullError(ServiceError):
    """There is no room for the request, but there may be in `retry_after_s` seconds. `limit` is the
    name of the limit that was reached, if it has one. The message begins with it."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED

    def __init__(self, message: str, retry_after_s: float, limit: str = "") -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.limit = limit

    def details(self) -> Sequence[Message]:
        return (_retry_info(self.retry_after_s),)


class UnauthenticatedError(ServiceError):
    code = grpc.StatusCode.UNAUTHENTICATED


class PermissionDeniedError(ServiceError):
    code = grpc.StatusCode.PERMISSION_DENIED


class OutOfRangeError(ServiceError):
    code = grpc.StatusCode.OUT_OF_RANGE


class DataLossError(ServiceError):
    code = grpc.StatusCode.DATA_LOSS


class StreamEndedError(ServiceError):
    """This process ends a stream, and the caller should open another. gRPC itself ends no call with
    this code, so the caller knows that the process has not died."""

    code = grpc.StatusCode.ABORTED


class UnimplementedError(ServiceError):
    code = grpc.StatusCode.UNIMPLEMENTED


class UnavailableError(ServiceError):
    """The request cannot be served now; `retry_after_s` is None if no time to retry is known."""

    code = grpc.StatusCode.UNAVAILABLE

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s

    def details(self) -> Sequence[Message]:
        return () if self.retry_after_s is None else (_retry_info(self.retry_after_s),)


class DeadlineError(ServiceError):
    code = grpc.StatusCode.DEADLINE_EXCEEDED


class InternalError(ServiceError):
    code = grpc.StatusCode.INTERNAL


def passed_on(error: aio.AioRpcError, otherwise: ServiceError) -> ServiceError:
    """Translates another service's rejection of a call into an error for this service's caller.
    Returns `otherwise` if the call ended for another reason."""
    message = error.details() or ""
    if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
        violations = _detail(error, error_details_pb2.BadRequest()).field_violations
        if violations:
            return InvalidArgumentError(violations[0].field, violations[0].description)
        return InvalidArgumentError("request", message)
    if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
        return FailedPreconditionError(message)
    if error.code() is grpc.StatusCode.DATA_LOSS:
        return DataLossError(message)
    if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
        delay = _detail(error, error_details_pb2.RetryInfo()).retry_delay
        return QueueFullError(message, delay.ToMilliseconds() / 1000 or RETRY_AFTER_S)
    return otherwise


def _detail(error: aio.AioRpcError, detail: Detail) -> Detail:
    """Fills in `detail` from the call's trailer, if the trailer has a google.rpc detail of its
    type."""
    for key, value in error.trailing_metadata() or ():
        if key == _DETAILS and isinstance(value, bytes):
            for packed in status_pb2.Status.FromString(value).details:
                packed.Unpack(detail)
    return detail


def _retry_info(delay_s: float) -> error_details_pb2.RetryInfo:
    delay = duration_pb2.Duration()
    delay.FromMilliseconds(round(delay_s * 1000))
    return error_details_pb2.RetryInfo(retry_delay=delay)
