"""Errors that a client may see, each with its gRPC status.

    ServiceError
    ├── InvalidArgumentError     INVALID_ARGUMENT     names the field and the limit (BadRequest)
    ├── NotFoundError            NOT_FOUND            this server lacks the service (health)
    ├── FailedPreconditionError  FAILED_PRECONDITION  a stale or misplaced step
    ├── QueueFullError           RESOURCE_EXHAUSTED   says when to retry (RetryInfo)
    ├── UnauthenticatedError     UNAUTHENTICATED      no valid token came with the call
    ├── PermissionDeniedError    PERMISSION_DENIED    the caller may not call this method
    ├── DataLossError            DATA_LOSS            a stream's reader fell behind; begin again
    ├── StreamEndedError         ABORTED              this process ends a stream; open another
    ├── UnavailableError         UNAVAILABLE          no engine is ready (RetryInfo if soon)
    ├── DeadlineError            DEADLINE_EXCEEDED
    └── InternalError            INTERNAL             what happened is in the log, not in the reply

Raise an error where the fault is known. Only `rpc.interceptors` translates errors to statuses.
"""

from __future__ import annotations

from collections.abc import Sequence

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

Metadata = tuple[tuple[str, str | bytes], ...]
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
    """A field of the request is wrong. `field` is its path in the message. The client must change
    the request."""

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
    """The state of the server excludes the call. The message names the state, such as a model that
    was replaced. The client may begin again without `resume_token_ids`, or repeat the call once the
    state has changed."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class NotFoundError(ServiceError):
    """The server lacks the service that a health check names. The client must correct the name."""

    code = grpc.StatusCode.NOT_FOUND


class QueueFullError(ServiceError):
    """There is no room for the request, but there may be in `retry_after_s` seconds. The client
    should repeat the call after that time. The message begins with `limit`, the name of the limit
    that was reached, if it has one."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED

    def __init__(self, message: str, retry_after_s: float, limit: str = "") -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.limit = limit

    def details(self) -> Sequence[Message]:
        return (_retry_info(self.retry_after_s),)


class UnauthenticatedError(ServiceError):
    """No valid token came with the call. The client must send one."""

    code = grpc.StatusCode.UNAUTHENTICATED


class PermissionDeniedError(ServiceError):
    """The caller may not call this method. It needs another certificate, or must be a
    process of the same user."""

    code = grpc.StatusCode.PERMISSION_DENIED


class DataLossError(ServiceError):
    """The reader of a stream fell behind. The client should open the stream again."""

    code = grpc.StatusCode.DATA_LOSS


class StreamEndedError(ServiceError):
    """This process ends a stream, and the caller should open another. The caller knows that the
    process has not died, because gRPC itself ends no call with this code."""

    code = grpc.StatusCode.ABORTED


class UnavailableError(ServiceError):
    """The request cannot be served now. `retry_after_s` is None if no time to retry is known. A new
    request first waits for an engine that was lost, up to 30 s from the loss. The client should
    repeat the call, with the tokens that it already has as `resume_token_ids`."""

    code = grpc.StatusCode.UNAVAILABLE

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s

    def details(self) -> Sequence[Message]:
        return () if self.retry_after_s is None else (_retry_info(self.retry_after_s),)


class DeadlineError(ServiceError):
    """The deadline passed before the request was finished. The client may allow more time."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED


class InternalError(ServiceError):
    """The server failed. Its log has the reason, but the message does not. The client should not
    repeat the call, because the request itself may be the cause."""

    code = grpc.StatusCode.INTERNAL


def _retry_info(delay_s: float) -> error_details_pb2.RetryInfo:
    delay = duration_pb2.Duration()
    delay.FromMilliseconds(round(delay_s * 1000))
    return error_details_pb2.RetryInfo(retry_delay=delay)
