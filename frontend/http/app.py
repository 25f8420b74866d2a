"""The paths of the HTTP interface."""

from __future__ import annotations

from typing import Any

MAX_HEAD_BYTES = 16 << 10


class App:
    def __init__(self, *_: Any) -> None: ...

    def drain(self) -> None: ...

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 404, "headers": []})
        await send({"type": "http.response.body", "body": b""})
