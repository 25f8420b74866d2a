"""Keeps other sites' scripts away from the page, and the page to itself.

A browser sends any site's requests to loopback, too. What it says of where they come from decides:
a name that some site has pointed here (DNS rebinding) is in Host, another site in Origin or, where
a request has none, in Sec-Fetch-Site.
"""

from __future__ import annotations

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

# Through a tunnel the port may be another.
HOSTS = ("127.0.0.1", "localhost", "[::1]")
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cache-Control": "no-cache",
}


class Guard:
    """Refuses what another site asks for, and says in every answer what the page may do."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        refusal = PlainTextResponse("asked for by another site", status_code=403)
        app = refusal if _is_foreign(Headers(scope=scope)) else self._app
        await app(scope, receive, send_guarded)


def _is_foreign(headers: Headers) -> bool:
    if origin := headers.get("origin"):
        return origin != f"http://{headers.get('host')}"
    elsewhere = headers.get("sec-fetch-site", "none") not in ("none", "same-origin")
    return elsewhere and headers.get("sec-fetch-mode") != "navigate"  # a link may lead here


class Bounded:
    """Refuses more than `limit` requests at a time with 503; `what` they are is for the message."""

    def __init__(self, app: ASGIApp, limit: int, what: str) -> None:
        self._app = app
        self._limit = limit
        self._refusal = PlainTextResponse(f"{limit} {what} are open already", status_code=503)
        self._open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._open >= self._limit:
            await self._refusal(scope, receive, send)
            return
        self._open += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._open -= 1
