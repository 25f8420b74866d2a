"""OpenAI's responses: `/v1/responses`."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, closing
from typing import Any, Literal

import orjson

from frontend.callers.call import CALL
from frontend.generation import REASONS
from frontend.http.answers import Answers, TokenTexts, answer_form, usage
from frontend.http.background.events import Json, ResponseEvents
from frontend.http.background.store import StoredResponse
from frontend.http.errors import ParameterError, response_error
from frontend.http.exchange import Answer, Request
from frontend.http.parameters import (
    Body,
    Int32,
    Items,
    Object,
    SamplingFields,
    set_constraint,
)
from frontend.http.prompts import Item, Tools, chat_of, item_messages, read_tools
from frontend.http.service import Service, now
from nano_vllm_grpc.pb import frontend_pb2 as pb
from shared.errors import ServiceError


class Tool(Body):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: Object | None = None
    strict: bool | None = None


class NamedTool(Body):
    type: Literal["function"]
    name: str


class Text(Body):
    format: Object | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningOptions(Body):
    effort: str | None = None
    summary: str | None = None


class ResponseBody(SamplingFields):
    """The parameters of a response."""

    input: str | Items[Item]
    instructions: str | None = None
    max_output_tokens: Int32 | None = None
    background: bool | None = None
    stream: bool | None = None
    text: Text | None = None
    tools: Items[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    chat_template_kwargs: Object | None = None
    include: Items[str] | None = None
    top_logprobs: Int32 | None = None
    truncation: Literal["disabled"] | None = None
    # These parameters have no effect on the answer.
    stream_options: Object | None = None
    max_tool_calls: int | None = None


_LOGPROBS = "message.output_text.logprobs"


async def create(service: Service, request: Request) -> Answer:
    """Makes a response."""
    body = service.read(ResponseBody, request)
    _check(body)
    tools = _tools(body)
    message = _message(service, request, body, tools)
    response = _response(service, body)
    if body.background:
        return await _create_background(service, body, message, tools, response)
    answers = await service.answers(message, tools, body.truncate_prompt_tokens)
    made = _Response(service, answers, response)
    return made.stream() if body.stream else await made.whole()


async def retrieve(service: Service, request: Request) -> Answer:
    """Returns a background response, or continues the stream of its events."""
    after = request.query.get("starting_after")
    if after is not None and not (after.isdecimal() and len(after) < 19):
        raise ParameterError("starting_after", "not the number of an event")
    if request.query.get("stream") == "true":
        stored = service.background.open(_owner(), request.parameters["id"])
        return _events(service, stored, -1 if after is None else int(after))
    if after is not None:
        raise ParameterError("starting_after", "requires stream=true")
    with _stored(service, request) as stored:
        return orjson.dumps(await service.background.response(stored))


async def delete(service: Service, request: Request) -> Answer:
    with _stored(service, request) as stored:
        service.background.delete(stored)
        return orjson.dumps({"id": stored.id, "object": "response", "deleted": True})


async def cancel(service: Service, request: Request) -> Answer:
    with _stored(service, request) as stored:
        service.background.cancel(stored)
        return orjson.dumps(await service.background.response(stored))


async def input_items(service: Service, request: Request) -> Answer:
    with _stored(service, request) as stored:
        items = stored.header["input"]
    if request.query.get("order", "desc") == "desc":
        items = items[::-1]
    if after := request.query.get("after"):
        items = items[next((i for i, item in enumerate(items, 1) if item["id"] == after), 0) :]
    limit = request.query.get("limit", "20")
    if not (limit.isdecimal() and 1 <= len(limit) <= 3 and 1 <= int(limit) <= 100):
        raise ParameterError("limit", "must be in [1, 100]")
    num_left, items = len(items) - int(limit), items[: int(limit)]
    return orjson.dumps(
        {
            "object": "list",
            "data": items,
            "first_id": items[0]["id"] if items else None,
            "last_id": items[-1]["id"] if items else None,
            "has_more": num_left > 0,
        }
    )


def _owner() -> str:
    call = CALL.get()
    return call.client.name if call and call.client else ""


def _stored(service: Service, request: Request) -> AbstractContextManager[StoredResponse]:
    return closing(service.background.open(_owner(), request.parameters["id"]))


def _check(body: ResponseBody) -> None:
    for item in body.include or ():
        if item not in (_LOGPROBS, "reasoning.encrypted_content"):
            raise ParameterError("include", f"only {_LOGPROBS} is served")
    if body.top_logprobs is not None and _LOGPROBS not in (body.include or ()):
        raise ParameterError("top_logprobs", f"requires {_LOGPROBS} in include")
    if body.background:
        if body.store is False:
            raise ParameterError("store", "a background response is stored")
        if _LOGPROBS in (body.include or ()):
            raise ParameterError("include", "log-probabilities are not stored: no background")


def _tools(body: ResponseBody) -> Tools:
    given = body.tool_choice
    choice, name = ("required", given.name) if isinstance(given, NamedTool) else (given, "")
    definitions = [
        tool.model_dump(include={"name", "description", "parameters"}, exclude_none=True)
        for tool in body.tools or ()
    ]
    return read_tools(definitions, choice, name, parallel=body.parallel_tool_calls is not False)


def _message(
    service: Service, request: Request, body: ResponseBody, tools: Tools
) -> pb.GenerateRequest:
    effort = service.effort("reasoning.effort", body.reasoning.effort if body.reasoning else None)
    messages = item_messages(body.instructions, body.input)
    kwargs = {**(body.chat_template_kwargs or {}), **effort}
    chat = chat_of(messages, tools, service.template, kwargs)
    message = service.chat_request(body, request, chat, body.max_output_tokens)
    if _LOGPROBS in (body.include or ()):
        message.sampling.logprobs = body.top_logprobs or 0
    _set_format(message.sampling, body.text.format if body.text else None)
    return message


def _set_format(sampling: pb.SamplingParams, form: dict[str, Any] | None) -> None:
    kind = form.get("type") if form else "text"
    if kind == "text":
        return
    if sampling.HasField("structured_output"):
        raise ParameterError("text.format", "cannot be used with another constraint")
    if kind == "json_object":
        set_constraint(sampling, "json_object", True)
    elif kind == "json_schema" and form and isinstance(form.get("schema"), dict):
        set_constraint(sampling, "json_schema", form["schema"])
    else:
        raise ParameterError("text.format", "must be text, json_object or json_schema")


def _items(body: ResponseBody) -> list[Json]:
    """The input as items with ids."""
    given = body.input
    if isinstance(given, str):
        given = [Item(role="user", content=given)]
    items = []
    for item in given:
        found = item.model_dump(exclude_none=True)
        found.setdefault("id", f"msg_{uuid.uuid4().hex}")
        if isinstance(text := found.get("content"), str):
            kind = "output_text" if item.role == "assistant" else "input_text"
            found["content"] = [{"type": kind, "text": text}]
        items.append(found)
    return items


def _response(service: Service, body: ResponseBody) -> Json:
    """A response before its first token."""
    choice = body.tool_choice or "auto"
    defaults = service.generations.facts.defaults
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": now(),
        "status": "queued" if body.background else "in_progress",
        "background": bool(body.background),
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": service.model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "service_tier": "default",
        "store": bool(body.background),
        "temperature": defaults.temperature if body.temperature is None else body.temperature,
        "text": {"format": (body.text.format if body.text else None) or {"type": "text"}},
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
        "tools": [tool.model_dump() for tool in body.tools or ()],
        "top_p": defaults.top_p if body.top_p is None else body.top_p,
        "top_logprobs": body.top_logprobs or 0,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
    }


async def _create_background(
    service: Service,
    body: ResponseBody,
    message: pb.GenerateRequest,
    tools: Tools,
    response: Json,
) -> Answer:
    tool_format = service.set_tools(message, tools)
    checked = await service.generations.check(message, None, body.truncate_prompt_tokens)
    form = answer_form(service.generations, checked, tool_format)
    stored = await service.background.create(checked, form, response, _items(body))
    if body.stream:
        return _events(service, stored, -1)
    with closing(stored):
        return orjson.dumps(await service.background.response(stored))


async def _events(service: Service, stored: StoredResponse, after: int) -> AsyncIterator[bytes]:
    with closing(stored):
        async for events in service.background.events(stored, after):
            yield events


class _Response:
    """Writes a response that is not stored."""

    def __init__(self, service: Service, answers: Answers, response: Json) -> None:
        self._service = service
        self._answers = answers
        self._generation = answers.generation
        self._events = ResponseEvents(response)
        self._texts = TokenTexts(service.generations, self._generation.request)

    async def whole(self) -> bytes:
        with closing(self._generation):
            self._events.start()
            while not self._generation.ended:
                await self._step()
                self._events.take()
            self._end()
        return orjson.dumps(self._events.response)

    async def stream(self) -> AsyncIterator[bytes]:
        begun = False
        with closing(self._generation):
            self._events.start()
            try:
                while not self._generation.ended:
                    await self._step()
                    begun = True
                    if events := self._events.take():
                        yield b"".join(events)
            except ServiceError as error:
                if not begun:
                    raise
                self._events.end("failed", None, response_error(error))
            else:
                self._end()
            yield b"".join(self._events.take())

    async def _step(self) -> None:
        for step in await self._answers.next():
            logprobs = self._texts.chat_entries(step.delta.logprobs)
            self._events.feed(step.events, len(step.delta.token_ids), logprobs)

    def _end(self) -> None:
        (ending,) = self._generation.endings
        totals = [self._generation.totals()]
        used = usage(totals, reports_cached=self._service.reports_cached)
        self._events.end(REASONS[ending.reason], used)
