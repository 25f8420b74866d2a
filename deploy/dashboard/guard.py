"""Protects the dashboard from other sites' scripts, and restricts what the dashboard loads.

A browser also sends other sites' requests to loopback. Headers tell where a request comes from:
Host has a name that a site has pointed here (DNS rebinding). Origin or, if a request has none,
Sec-Fetch-Site tells that another site sends the request.
"""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

# Without ports, because a tunnel may use another one.
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
    """Rejects requests of other sites, and restricts the dashboard by headers in every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        refusal = PlainTextResponse("the request comes from another site", status_code=403)
        app = refusal if _is_foreign(Headers(scope=scope)) else self._app
        await app(scope, receive, send_guarded)


def _is_foreign(headers: Headers) -> bool:
    if origin := headers.get("origin"):
        return origin != f"http://{headers.get('host')}"
    elsewhere = headers.get("sec-fetch-site", "none") not in ("none", "same-origin")
    return elsewhere and headers.get("sec-fetch-mode") != "navigate"  # other sites may link here


class Limit:
    """Rejects more than `limit` requests at a time with 503; the message calls them `what`."""

    def __init__(self, app: ASGIApp, limit: int, what: str) -> None:
        self._app = app
        self._free = asyncio.Semaphore(limit)
        self._refusal = PlainTextResponse(f"{limit} {what} are open already", status_code=503)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._free.locked():
            await self._refusal(scope, receive, send)
            return
        async with self._free:
            await self._app(scope, receive, send)
