"""Translates errors to HTTP statuses, and to the forms of OpenAI's and Anthropic's APIs."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from typing import Any

import orjson
from grpc import StatusCode

from shared.errors import (
    InternalError,
    InvalidArgumentError,
    QueueFullError,
    ServiceError,
    UnavailableError,
)

# By gRPC's status; others are the server's failure.
STATUSES = {
    StatusCode.INVALID_ARGUMENT: 400,
    StatusCode.UNAUTHENTICATED: 401,
    StatusCode.PERMISSION_DENIED: 403,
    StatusCode.NOT_FOUND: 404,
    StatusCode.FAILED_PRECONDITION: 409,
    StatusCode.RESOURCE_EXHAUSTED: 429,
    StatusCode.UNAVAILABLE: 503,
    StatusCode.DEADLINE_EXCEEDED: 504,
}
# The names of the kinds of errors in OpenAI's and in Anthropic's API.
_TYPES = {
    400: ("invalid_request_error", "invalid_request_error"),
    401: ("authentication_error", "authentication_error"),
    403: ("permission_error", "permission_error"),
    404: ("not_found_error", "not_found_error"),
    413: ("invalid_request_error", "request_too_large"),
    429: ("rate_limit_error", "rate_limit_error"),
    503: ("server_error", "overloaded_error"),
}
# The names in HTTP requests of fields of protos/frontend.proto, first those of single APIs. Of
# several names, the first one that the request has counts.
_NAMES: dict[str, Sequence[tuple[str, str]]] = {
    "/v1/chat/completions": [("logprobs", "top_logprobs"), ("max_tokens", "max_completion_tokens")],
    "/v1/messages": [("stop", "stop_sequences")],
    "/v1/responses": [
        ("chat", "input"),
        ("messages", "input"),
        ("max_tokens", "max_output_tokens"),
        ("logprobs", "top_logprobs"),
        ("structured_output.json_schema", "text.format.schema"),
        ("structured_output", "text.format"),
    ],
    "": [
        ("text", "prompt"),
        ("token_ids", "prompt"),
        ("chat", "messages"),
        ("queries", "query"),
        ("queries", "text_1"),
        ("documents", "text_2"),
        ("beam_width", "use_beam_search"),
        ("include_stop_in_output", "include_stop_str_in_output"),
        ("structured_output.choice.options", "structured_outputs.choice"),
        ("structured_output.json_schema", "structured_outputs.json"),
        ("structured_output", "structured_outputs"),
        ("structured_output.regex", "regex"),
        ("structured_output.grammar", "ebnf"),
        ("structured_output", "response_format"),
        ("structured_output.structural_tag", "tools"),
        ("structured_output", "tool_choice"),
    ],
}


class ParameterError(InvalidArgumentError):
    """A parameter of an HTTP request is wrong. `field` is its path in the request."""


class HttpError(ServiceError):
    """An error that only HTTP has, with its status and the code of OpenAI's API. `allow`: the
    methods of the path."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str = "",
        param: str | None = None,
        allow: str = "",
    ) -> None:
        super().__init__(message)
        self.allow = allow
        self.status = status
        self.error_code = code
        self.param = param


def unknown_model(name: str) -> HttpError:
    message = f"model: {name[:256]!r} is not served here; GET /v1/models names the model"
    return HttpError(404, message, "model_not_found", "model")


def status_of(error: ServiceError) -> int:
    return error.status if isinstance(error, HttpError) else STATUSES.get(error.code, 500)


def headers_of(error: ServiceError) -> list[tuple[bytes, bytes]]:
    """The headers that say how to send the request instead."""
    if isinstance(error, HttpError) and error.allow:
        return [(b"allow", error.allow.encode())]
    if status_of(error) == 401:
        return [(b"www-authenticate", b"Bearer")]
    if isinstance(error, QueueFullError | UnavailableError) and error.retry_after_s is not None:
        return [(b"retry-after", str(max(1, math.ceil(error.retry_after_s))).encode())]
    return []


def openai_error(
    error: ServiceError, path: str = "", given: Collection[str] = ()
) -> dict[str, Any]:
    """The object under `error` in OpenAI's API.

    Args:
        path: of the request.
        given: the names of its parameters.
    """
    status = status_of(error)
    code: str | None = None
    message, param = str(error), None
    if isinstance(error, HttpError):
        code, param = error.error_code or None, error.param
    elif isinstance(error, InvalidArgumentError):
        is_own = isinstance(error, ParameterError)
        param = error.field if is_own else _http_name(error.field, path, given)
        message = f"{param}: {error.reason.replace('sampling.', '')}"
    kind = _TYPES.get(status, ("invalid_request_error" if status < 500 else "server_error",))[0]
    return {"message": message, "type": kind, "param": param, "code": code}


def _anthropic_error(error: ServiceError, message: str) -> dict[str, Any]:
    status = status_of(error)
    kind = _TYPES.get(status, ("", "invalid_request_error" if status < 500 else "api_error"))[1]
    return {"type": "error", "error": {"type": kind, "message": message}}


def response_error(error: ServiceError) -> dict[str, Any]:
    """The error of a response that failed."""
    return {"code": "server_error", "message": openai_error(error, "/v1/responses")["message"]}


def body_of(
    error: ServiceError, path: str, given: Collection[str], *, is_event: bool = False
) -> bytes:
    """The body of an error, or the last event of a stream, in the form of the path's API."""
    shown = openai_error(error, path, given)
    if is_event and path.startswith("/v1/responses"):
        return orjson.dumps({**shown, "type": "error", "code": shown["code"] or shown["type"]})
    if path.startswith("/v1/messages"):
        return orjson.dumps(_anthropic_error(error, shown["message"]))
    return orjson.dumps({"error": shown})


def _http_name(field: str, path: str, given: Collection[str]) -> str:
    """The name in a request to `path` of a field of protos/frontend.proto."""
    field = field.removeprefix("sampling.").removeprefix("chat.")
    found = [
        here + field[len(name) :]
        for name, here in (*_NAMES.get(path, ()), *_NAMES[""])
        if field == name or field.startswith((f"{name}.", f"{name}["))
    ]
    found.append(field)
    return next((name for name in found if re.split(r"[.\[]", name)[0] in given), found[0])


def public(error: Exception) -> ServiceError:
    """The error that a client sees; what is no `ServiceError` stays in the log."""
    return error if isinstance(error, ServiceError) else InternalError("internal error")
