"""The dashboard's routes: its files, the stack's state as it changes, and a chat."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from deploy.dashboard.guard import HOSTS, Guard, Limit
from deploy.dashboard.observer import Observer
from deploy.stack import Stack
from nano_vllm_grpc import AsyncLLM, LLMError

_STATIC = Path(__file__).parent / "static"
_MAX_PAGES, _MAX_ANSWERS = 16, 8  # at a time
_MAX_BODY_BYTES = 1 << 20
_BODY_S = 10.0


class Turn(BaseModel, extra="forbid"):
    role: Literal["system", "user", "assistant"]
    content: str


class ChatRequest(BaseModel, extra="forbid"):
    """A conversation for which the model is to write the next turn."""

    messages: Annotated[list[Turn], Field(min_length=1, max_length=1000)]


def make_app(stack: Stack, observer: Observer, llm: AsyncLLM) -> Starlette:
    disabled = chat_disabled(stack)
    facts = {"model": stack.model, "address": stack.address, "chat_disabled": disabled}

    async def index(_: Request) -> Response:
        return FileResponse(_STATIC / "index.html")

    async def health(_: Request) -> Response:
        return Response()

    async def events(_: Request) -> Response:
        return _stream(facts | state async for state in observer.states())

    async def chat(request: Request) -> Response:
        if disabled:
            raise HTTPException(403, disabled)
        return _stream(_answer(llm, await _read(request)))

    return Starlette(
        routes=[
            Route("/", index),
            Route("/health", health),
            Route("/events", events, middleware=[_limit(_MAX_PAGES, "pages")]),
            Route("/chat", chat, methods=["POST"], middleware=[_limit(_MAX_ANSWERS, "answers")]),
            Mount("/static", StaticFiles(directory=_STATIC)),
        ],
        middleware=[
            Middleware(Guard),
            Middleware(TrustedHostMiddleware, allowed_hosts=HOSTS, www_redirect=False),
        ],
    )


def chat_disabled(stack: Stack) -> str:
    """Returns why there can be no chat, or "". The dashboard does not authenticate users."""
    if stack.auth_tokens_file:
        return "the chat is disabled: clients of this stack need a token"
    if stack.public_tls and stack.public_tls.cert:
        return "the chat is disabled: clients of this stack need a certificate"
    return ""


def _limit(limit: int, what: str) -> Middleware:
    return Middleware(Limit, limit=limit, what=what)


async def _read(request: Request) -> ChatRequest:
    """
    Raises:
        HTTPException: the body is too large, too slow or invalid.
    """
    if request.headers.get("content-type") != "application/json":
        raise HTTPException(415, "content-type: must be application/json")
    body = b""
    try:
        async with asyncio.timeout(_BODY_S):
            async for part in request.stream():
                body += part
                if len(body) > _MAX_BODY_BYTES:
                    raise HTTPException(413, f"body: more than {_MAX_BODY_BYTES} bytes")
        return ChatRequest.model_validate_json(body)
    except TimeoutError:
        raise HTTPException(408, f"body: incomplete after {_BODY_S:.0f} s") from None
    except ClientDisconnect:
        raise HTTPException(400, "body: incomplete") from None
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "body"
        raise HTTPException(400, f"{field}: {first['msg']}") from None


async def _answer(llm: AsyncLLM, request: ChatRequest) -> AsyncIterator[dict[str, Any]]:
    """Yields the pieces of the answer, or an error. When the browser disconnects, the request is
    cancelled."""
    messages = [{"role": each.role, "content": each.content} for each in request.messages]
    try:
        async with aclosing(llm.stream(messages)) as stream:
            async for chunk in stream:
                yield {
                    "text": chunk.text,
                    "finish_reason": chunk.finish_reason,
                    "usage": chunk.usage,
                    "timings": chunk.timings,
                }
    except LLMError as error:
        yield {"error": error.message}


def _stream(values: AsyncIterator[dict[str, Any]]) -> StreamingResponse:
    """Returns a response of server-sent events."""

    async def events() -> AsyncIterator[str]:
        async for value in values:
            yield f"data: {json.dumps(value)}\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")
