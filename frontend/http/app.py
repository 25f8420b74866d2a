"""The paths of the HTTP interface, and the checks that every request passes."""

from __future__ import annotations

import asyncio
import ipaddress
import uuid
from collections.abc import Awaitable, Callable, Sequence
from email.utils import formatdate
from typing import Any
from urllib.parse import urlsplit

from starlette.middleware.cors import CORSMiddleware
from starlette.routing import compile_path
from starlette.types import ASGIApp, Receive, Scope, Send

from frontend.callers.admission import Admission
from frontend.callers.call import Call
from frontend.generations import Generations
from frontend.http import chat, completions, embeddings, messages, models, responses, scores
from frontend.http.background.responses import BackgroundResponses
from frontend.http.errors import HttpError
from frontend.http.exchange import Answer, Exchange, Request
from frontend.http.service import Service
from frontend.settings import FrontendSettings
from frontend.validation import check_request_id
from nano_vllm_grpc.channels import stays_on_host
from shared.errors import ServiceError, UnavailableError
from shared.rpc.open_calls import OpenCalls

MAX_HEAD_BYTES = 16 << 10  # of a request's line and headers
_HINT = "header 'Authorization: Bearer TOKEN' or 'x-api-key: TOKEN'"
_HEALTH = ("/health", "/readiness", "/liveness")

# Raises `ServiceError` if a parameter is wrong, or the request fails.
Handler = Callable[[Service, Request], Awaitable[Answer]]
_ROUTES: Sequence[tuple[str, str, Handler]] = (
    ("POST", "/v1/chat/completions", chat.create),
    ("POST", "/v1/completions", completions.create),
    ("POST", "/v1/embeddings", embeddings.create),
    *(("POST", f"{version}/rerank", scores.rerank) for version in ("", "/v1", "/v2")),
    *(("POST", f"{version}/score", scores.score) for version in ("", "/v1")),
    ("POST", "/v1/responses", responses.create),
    ("GET", "/v1/responses/{id}", responses.retrieve),
    ("DELETE", "/v1/responses/{id}", responses.delete),
    ("POST", "/v1/responses/{id}/cancel", responses.cancel),
    ("GET", "/v1/responses/{id}/input_items", responses.input_items),
    ("POST", "/v1/messages", messages.create),
    ("POST", "/v1/messages/count_tokens", messages.count_tokens),
    ("GET", "/v1/models", models.list_models),
    ("GET", "/v1/models/{id:path}", models.retrieve),
    ("POST", "/tokenize", models.tokenize),
    ("POST", "/v1/tokenize", models.tokenize),
    ("POST", "/detokenize", models.detokenize),
    ("POST", "/v1/detokenize", models.detokenize),
)
_PATTERNS = [(method, path, compile_path(path)[0], handler) for method, path, handler in _ROUTES]


class App:
    """An ASGI application.

    Args:
        calls: the open calls of the process, over gRPC and HTTP.
    """

    def __init__(
        self,
        settings: FrontendSettings,
        generations: Generations,
        admission: Admission,
        calls: OpenCalls,
    ) -> None:
        self._settings = settings
        self._engines = generations.engines
        self._admission = admission
        self._calls = calls
        # A web page whose name suddenly means this host (DNS rebinding) must not get in.
        on_loopback = stays_on_host(f"{settings.host}:0")
        self._checks_host = on_loopback and not admission.needs_token
        self._own_names = {name.lower() for name in (settings.host, *settings.http_hosts)}
        self._parsing = asyncio.Lock()
        self._stopping = False
        self.background = BackgroundResponses(
            settings.responses_directory,
            generations,
            admission,
            calls,
            reports_cached=settings.report_cached_tokens,
        )
        self._service = Service(generations, settings.report_cached_tokens, self.background)
        self._app: ASGIApp = self._serve
        if settings.http_origins:
            self._app = CORSMiddleware(
                self._serve,
                allow_origins=settings.http_origins,
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["*"],
                expose_headers=["x-request-id", "retry-after"],
            )

    def drain(self) -> None:
        """Reports that this process stops, and leaves background responses to others."""
        self._stopping = True
        self.background.stop()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send)
        headers = [(b"date", formatdate(usegmt=True).encode())]
        try:
            self._check_head(exchange)
            if scope["path"] in _HEALTH:
                await exchange.run(self._health(scope["path"]), headers)
                return
            method, handler, parameters = _route(scope["method"], scope["path"])
            await self._call(exchange, method, handler, parameters, headers)
        except asyncio.CancelledError:
            if not exchange.is_gone:
                raise
        except Exception as error:
            await exchange.fail(error, headers)

    async def _call(
        self,
        exchange: Exchange,
        method: str,
        handler: Handler,
        parameters: dict[str, str],
        headers: list[tuple[bytes, bytes]],
    ) -> None:
        """Has `handler` answer a request of a known path, with the caller's limits."""
        call = Call(method, exchange.peer)
        try:
            call.client = self._admission.client(exchange.token, _HINT)
        except ServiceError:
            with self._admission.recorded(call):
                raise
        async with self._calls.span(method):
            with self._admission.placed(call, exchange.headers.get("traceparent", "")):
                body = await exchange.read_json(self._settings.max_message_bytes, self._parsing)
                request_id = _request_id(exchange, body)
                headers.append((b"x-request-id", request_id.encode()))
                if method.startswith("/v1/messages"):
                    headers.append((b"request-id", request_id.encode()))  # of Anthropic's API
                request = Request(body, exchange.query, parameters, request_id)
                await exchange.run(handler(self._service, request), headers)

    async def _health(self, path: str) -> Answer:
        if path != "/liveness" and (self._stopping or not self._engines.serving):
            raise UnavailableError("no engine is ready, or this server is stopping")
        return b'{"status":"ok"}'

    def _check_head(self, exchange: Exchange) -> None:
        """Raises HttpError if the head is too large, or a web page that is not allowed sent it."""
        scope = exchange.scope
        size = len(scope["raw_path"]) + len(scope["query_string"])
        if size + sum(len(name) + len(value) for name, value in scope["headers"]) > MAX_HEAD_BYTES:
            raise HttpError(431, f"headers: more than {MAX_HEAD_BYTES} bytes")
        host = exchange.headers.get("host", "localhost")
        trusted = self._is_own_name(host)
        if self._checks_host and not trusted:
            raise HttpError(
                421, "host: not a name of this server; http_hosts (NANO_HTTP_HOSTS) names others"
            )
        origin = exchange.headers.get("origin", "")
        if origin and not (trusted and origin.partition("://")[2] == host):
            allowed = self._settings.http_origins
            if origin not in allowed and "*" not in allowed:
                raise HttpError(
                    403, "origin: not allowed; http_origins (NANO_HTTP_ORIGINS) permits web pages"
                )

    def _is_own_name(self, host: str) -> bool:
        """Whether a Host header has an address, or a name that no stranger can give to it."""
        try:
            name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
            if name == "localhost" or name.endswith(".localhost"):
                return True
            return name in self._own_names or bool(ipaddress.ip_address(name))
        except ValueError:
            return False


def _request_id(exchange: Exchange, body: Any) -> str:
    """The id that the header or the body gives to a request, or a new one.

    Raises:
        ParameterError: the id is too long, or not printable.
    """
    given, field = exchange.headers.get("x-request-id", ""), "X-Request-Id"
    if not given and isinstance(body, dict) and isinstance(body.get("request_id"), str):
        given, field = body["request_id"], "request_id"
    check_request_id(field, given)
    return given or uuid.uuid4().hex


def _route(method: str, path: str) -> tuple[str, Handler, dict[str, str]]:
    """The path as the log names it, its handler and the parameters in it.

    Raises:
        HttpError: there is no such path, or not for this method.
    """
    methods = []
    for known, name, pattern, handler in _PATTERNS:
        if match := pattern.fullmatch(path):
            if known == method:
                return name, handler, match.groupdict()
            methods.append(known)
    if methods:
        allow = ", ".join(methods)
        raise HttpError(405, f"method: {method} is not served; use {allow}", allow=allow)
    raise HttpError(404, "path: not served; see docs/use/http.md")
