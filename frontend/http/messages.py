"""Anthropic's messages: `POST /v1/messages` and `POST /v1/messages/count_tokens`."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import closing
from typing import Any, Literal

import orjson

from frontend.engines.token_stream import FinishReason
from frontend.generation import Totals
from frontend.http.answers import Answers
from frontend.http.errors import ParameterError
from frontend.http.exchange import Answer, Request
from frontend.http.formats.parser import (
    CallArguments,
    CallBegin,
    Content,
    Event,
    Reasoning,
)
from frontend.http.parameters import (
    Body,
    Int32,
    Items,
    Object,
    SamplingFields,
    generate_request,
    read_body,
)
from frontend.http.prompts import (
    Function,
    Tools,
    chat_of,
    force_calls,
    read_tools,
    tool_call,
)
from frontend.http.service import Service
from frontend.validation import MAX_TOKENIZED
from nano_vllm_grpc.pb import frontend_pb2 as pb

Json = dict[str, Any]


class Block(Body):
    """A part of a message."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: Object | None = None
    tool_use_id: str | None = None
    content: str | Items[Block] | None = None
    is_error: bool | None = None


class Message(Body):
    role: Literal["user", "assistant", "system"]
    content: str | Items[Block]


class Tool(Body):
    name: str
    type: Literal["custom"] | None = None
    description: str | None = None
    input_schema: Object | None = None


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str = ""
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    type: Literal["enabled", "disabled", "adaptive"]


class PromptBody(SamplingFields):
    """The parameters from which a prompt is made."""

    messages: Items[Message]
    model: str | None = None
    system: str | Items[Block] | None = None
    tools: Items[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    chat_template_kwargs: Object | None = None


class MessageBody(PromptBody):
    """The parameters of a message."""

    max_tokens: Int32
    stop_sequences: Items[str] | None = None
    stream: bool | None = None


async def create(service: Service, request: Request) -> Answer:
    """Answers a chat.

    Raises:
        ServiceError: a parameter is wrong, or the request failed.
    """
    body = read_body(MessageBody, request.body)
    service.check_model(body.model)
    tools = _tools(body)
    message = await generate_request(body, service.generations.tokenizer)
    message.request_id = request.request_id
    message.chat.CopyFrom(_chat(service, body, tools))
    message.sampling.max_tokens = body.max_tokens
    message.sampling.stop.extend(body.stop_sequences or ())
    force_calls(message.sampling, tools, service.template)
    answers = await service.answers(message, tools, body.truncate_prompt_tokens)
    writer = _Message(service, answers)
    return writer.stream() if body.stream else await writer.whole()


async def count_tokens(service: Service, request: Request) -> Answer:
    """Returns the number of tokens of a prompt."""
    body = read_body(PromptBody, request.body)
    service.check_model(body.model)
    chat = pb.TokenizeRequest(chat=_chat(service, body, _tools(body)))
    tokens = await service.generations.encode(chat, MAX_TOKENIZED)
    return orjson.dumps({"input_tokens": len(tokens)})


def _tools(body: PromptBody) -> Tools:
    choice = body.tool_choice or ToolChoice(type="auto")
    definitions = []
    for tool in body.tools or ():
        found: Json = {"name": tool.name}
        if tool.description is not None:
            found["description"] = tool.description
        definitions.append(found | {"parameters": tool.input_schema or {"type": "object"}})
    names = {"any": "required", "tool": "required", "none": "none", "auto": "auto"}
    return read_tools(
        definitions,
        names[choice.type],
        choice.name if choice.type == "tool" else "",
        parallel=not choice.disable_parallel_tool_use,
    )


def _chat(service: Service, body: PromptBody, tools: Tools) -> pb.Chat:
    messages = []
    if body.system:
        messages.append(pb.ChatMessage(role="system", content=_text("system", body.system)))
    for index, message in enumerate(body.messages):
        messages += _messages(f"messages[{index}].content", message)
    kwargs = dict(body.chat_template_kwargs or {})
    if body.thinking and "enable_thinking" in service.template:
        kwargs["enable_thinking"] = body.thinking.type != "disabled"
    continues = bool(messages) and messages[-1].role == "assistant"
    return chat_of(messages, tools, service.template, kwargs, continues=continues)


def _messages(field: str, message: Message) -> list[pb.ChatMessage]:
    """The messages of a chat that one message becomes: outputs of tools have their own."""
    if isinstance(message.content, str):
        return [pb.ChatMessage(role=message.role, content=message.content)]
    found: list[pb.ChatMessage] = []
    rest = pb.ChatMessage(role=message.role)
    texts = []
    for index, block in enumerate(message.content):
        where = f"{field}[{index}]"
        if block.type == "tool_result":
            output = _text(f"{where}.content", block.content or "")
            found.append(
                pb.ChatMessage(role="tool", content=output, tool_call_id=block.tool_use_id or "")
            )
        elif block.type == "tool_use":
            function = Function(name=block.name or "", arguments=block.input)
            rest.tool_calls.append(tool_call(block.id, function))
        elif block.type == "thinking":
            rest.reasoning_content = block.thinking or ""
        elif block.type != "redacted_thinking":
            texts.append(_text(where, [block]))
    rest.content = "\n".join(texts)
    if texts or rest.tool_calls or rest.HasField("reasoning_content") or not found:
        found.append(rest)
    return found


def _text(field: str, content: str | Sequence[Block]) -> str:
    """
    Raises:
        ParameterError: a block is not a text.
    """
    if isinstance(content, str):
        return content
    for block in content:
        if block.type != "text" or block.text is None:
            raise ParameterError(field, "not a text; this model takes only texts")
    return "\n".join(block.text or "" for block in content)


class _Message:
    """Writes the answer to one chat."""

    def __init__(self, service: Service, answers: Answers) -> None:
        self._service = service
        self._answers = answers
        self._generation = answers.generation
        self._blocks: list[Json] = []
        self._is_open = False  # whether the last block may grow
        self._about: Json = {
            "id": f"msg_{self._generation.request.request_id}",
            "type": "message",
            "role": "assistant",
            "model": service.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }

    async def whole(self) -> bytes:
        with closing(self._generation):
            while not self._generation.ended:
                for step in await self._answers.next():
                    self._block_events(step.events)
        for block in self._blocks:
            if block["type"] == "tool_use":
                block["input"] = _object("".join(block.pop("json")))
            else:
                key = "text" if block["type"] == "text" else "thinking"
                block[key] = "".join(block[key])
        content = {"content": self._blocks, "usage": self._usage(self._generation.totals())}
        return orjson.dumps(self._about | content | self._stop())

    async def stream(self) -> AsyncIterator[bytes]:
        generation = self._generation
        begun = False
        with closing(generation):
            while not generation.ended:
                events: list[Json] = []
                for step in await self._answers.next():
                    if not begun:
                        begun = True
                        usage = self._usage(generation.totals()) | {"output_tokens": 0}
                        events.append(
                            {"type": "message_start", "message": self._about | {"usage": usage}}
                        )
                    events += self._block_events(step.events)
                if events:
                    yield b"".join(map(_event, events))
            last = [
                *self._close(),
                {
                    "type": "message_delta",
                    "delta": self._stop(),
                    "usage": self._usage(generation.totals()),
                },
                {"type": "message_stop"},
            ]
            yield b"".join(map(_event, last))

    def _block_events(self, events: Sequence[Event]) -> list[Json]:
        """Adds parts to the blocks. Returns the events that show them."""
        found: list[Json] = []
        for event in events:
            match event:
                case Content(text):
                    found += self._grow("text", {"text": []}, text)
                case Reasoning(text):
                    found += self._grow("thinking", {"thinking": [], "signature": ""}, text)
                case CallBegin(name):
                    found += self._close()
                    call = {"id": f"toolu_{uuid.uuid4().hex[:24]}", "name": name, "input": {}}
                    found += self._open({"type": "tool_use", **call, "json": []})
                case CallArguments(text):
                    self._blocks[-1]["json"].append(text)
                    found.append(self._delta({"type": "input_json_delta", "partial_json": text}))
        return found

    def _grow(self, kind: str, empty: Json, text: str) -> list[Json]:
        found: list[Json] = []
        if not (self._is_open and self._blocks[-1]["type"] == kind):
            found += self._close()
            found += self._open({"type": kind, **empty})
        self._blocks[-1][kind].append(text)
        return [*found, self._delta({"type": f"{kind}_delta", kind: text})]

    def _open(self, block: Json) -> list[Json]:
        self._blocks.append(block)
        self._is_open = True
        empty = {key: "" if value == [] else value for key, value in block.items() if key != "json"}
        start = {"type": "content_block_start", "index": len(self._blocks) - 1}
        return [start | {"content_block": empty}]

    def _delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _close(self) -> list[Json]:
        if not self._is_open:
            return []
        self._is_open = False
        return [{"type": "content_block_stop", "index": len(self._blocks) - 1}]

    def _stop(self) -> Json:
        """Anthropic's reason for the end."""
        (ending,) = self._generation.endings
        sequence = ending.stop_reason if isinstance(ending.stop_reason, str) else None
        if ending.reason is FinishReason.LENGTH:
            reason = "max_tokens"
        elif sequence is not None:
            reason = "stop_sequence"
        elif any(block["type"] == "tool_use" for block in self._blocks):
            reason = "tool_use"
        else:
            reason = "end_turn"
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _usage(self, totals: Totals) -> Json:
        cached = totals.cached_prompt_tokens if self._service.reports_cached else 0
        return {
            "input_tokens": totals.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": totals.completion_tokens,
        }


def _object(text: str) -> Json:
    """The arguments of a call; empty if the model did not finish them."""
    try:
        found = orjson.loads(text)
    except orjson.JSONDecodeError:
        return {}
    return found if isinstance(found, dict) else {}


def _event(event: Json) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (event["type"].encode(), orjson.dumps(event))
