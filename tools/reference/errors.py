"""The page of errors: statuses of the server, and exceptions of the Python client."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import TypeVar

import grpc
from grpc import aio

import nano_vllm_grpc.errors
import shared.errors
from frontend.http.errors import STATUSES
from nano_vllm_grpc import AsyncLLM
from nano_vllm_grpc.errors import LLMError, from_rpc_error
from shared.errors import (
    InvalidArgumentError,
    QueueFullError,
    ServiceError,
    UnavailableError,
)
from tools.reference import markdown
from tools.reference.markdown import code, codes, described, prose, table

Error = TypeVar("Error", bound=Exception)
_HTTP_ALONE = (
    ("403", "a web page that is not allowed sent the request"),
    ("404", "the path or the model is not served, or a response is not stored"),
    ("405", "the path is served for another method"),
    ("408", "the body did not arrive in time"),
    ("413", "the body is too large"),
    ("421", "the Host header is no name of this server"),
    ("431", "the request's line and headers are too large"),
)
_SAMPLES: Mapping[type[ServiceError], ServiceError] = {
    InvalidArgumentError: InvalidArgumentError("field", "reason"),
    QueueFullError: QueueFullError("message", retry_after_s=1),
    UnavailableError: UnavailableError("message", retry_after_s=1),
}


def page() -> str:
    wait = inspect.signature(AsyncLLM).parameters["max_retry_wait_s"].default
    return markdown.page(
        "Errors",
        "This page lists the errors of the gRPC API with their HTTP statuses, and the exceptions "
        "of the Python client. It says what a client should do about each.",
        "## Statuses",
        "A message names the field, the value and the limit, and never quotes a prompt. Details "
        "are messages of `google.rpc` in the trailer `grpc-status-details-bin`. Over HTTP, "
        "the status is the one in the last column. Below, `field` and `retry_after_s` are values "
        "in the details.",
        table(("Status", "Number", "Exception in the server", "Details", "HTTP"), _statuses()),
        "\n".join(
            f"- {code(each.code.name)}: {prose(each.__doc__ or '')}"
            for each in _classes(shared.errors, ServiceError)
        ),
        "gRPC itself ends calls with `CANCELLED` if the client cancels them, and with "
        "`UNAVAILABLE` if it cannot reach the server. A frontend reports every exception that is "
        "not listed as `INTERNAL`, with the message `internal error`.",
        "## Statuses of HTTP",
        "Some statuses exist over HTTP alone.",
        described(("HTTP", "Reason"), _HTTP_ALONE),
        "## Exceptions of the Python client",
        "All exceptions derive from `LLMError`, and have a `message` and a gRPC status, `code`. "
        "The classes `LLM` and `AsyncLLM` repeat requests that end with `UNAVAILABLE`. They repeat "
        "requests that end with `RESOURCE_EXHAUSTED` if the server says when to retry. After "
        f"{wait:g} s without a token (`max_retry_wait_s`), they raise the error.",
        table(("Exception", "Status", "Attributes"), _exceptions()),
        "\n".join(
            f"- {code(each.__name__)}: {prose(each.__doc__ or '')}"
            for each in _classes(nano_vllm_grpc.errors, LLMError)
        ),
    )


def _classes(module: ModuleType, base: type[Error]) -> list[type[Error]]:
    """The errors of a module below `base`, in its order."""
    found = [each for each in vars(module).values() if inspect.isclass(each)]
    return [each for each in found if issubclass(each, base) and each is not base]


def _statuses() -> Iterator[tuple[str, ...]]:
    for each in _classes(shared.errors, ServiceError):
        error = _SAMPLES.get(each) or each("message")
        details = codes(detail.DESCRIPTOR.name for detail in error.details())
        number, http = str(each.code.value[0]), STATUSES.get(each.code, 500)
        yield (
            code(each.code.name),
            number,
            code(each.__name__),
            details or "none",
            str(http),
        )


def _exceptions() -> Iterator[tuple[str, ...]]:
    statuses: dict[type[LLMError], list[str]] = {}
    for status in grpc.StatusCode:
        empty = aio.Metadata()
        call = aio.AioRpcError(status, empty, empty, details="message")
        if status is not grpc.StatusCode.OK:
            statuses.setdefault(type(from_rpc_error(call, "address")), []).append(status.name)
    for each in _classes(nano_vllm_grpc.errors, LLMError):
        known = statuses.get(each, [])
        shown = codes(known) if len(known) == 1 else "all others" if known else "none"
        own = [
            name for name in inspect.signature(each).parameters if name not in ("message", "code")
        ]
        yield code(each.__name__), shown, codes(own) or "none"
