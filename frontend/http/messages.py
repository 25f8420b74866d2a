"""Anthropic's messages: `POST /v1/messages` and `POST /v1/messages/count_tokens`."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import closing
from typing import Any, Literal

import orjson

from frontend.engines.token_stream import FinishReason
from frontend.generation import Totals
from frontend.http.answers import Answers, named_event
from frontend.http.errors import ParameterError
from frontend.http.exchange import Answer, Request
from frontend.http.formats.parser import CallArguments, CallBegin, Content, Event, Reasoning
from frontend.http.parameters import Body, Int32, Items, Object, SamplingFields
from frontend.http.prompts import Function, Tools, chat_of, read_tools, tool_call
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
    """Answers a chat."""
    body = service.read(MessageBody, request)
    tools = _tools(body)
    chat = _chat(service, body, tools)
    message = service.chat_request(body, request, chat, body.max_tokens)
    message.sampling.stop.extend(body.stop_sequences or ())
    answers = await service.answers(message, tools, body.truncate_prompt_tokens)
    writer = _Message(service, answers)
    return writer.stream() if body.stream else await writer.whole()


async def count_tokens(service: Service, request: Request) -> Answer:
    """Returns the number of tokens of a prompt."""
    body = service.read(PromptBody, request)
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
    """Raises ParameterError if a block is not a text."""
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
        self._arguments = ""  # of the last block, if it is a call
        self._events: list[bytes] = []  # that were not sent
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
        async for _ in self.stream():
            pass
        content = {"content": self._blocks, "usage": self._usage(self._generation.totals())}
        return orjson.dumps(self._about | self._stop() | content)

    async def stream(self) -> AsyncIterator[bytes]:
        generation = self._generation
        begun = False
        with closing(generation):
            while not generation.ended:
                steps = await self._answers.next()
                if steps and not begun:
                    begun = True
                    usage = self._usage(generation.totals()) | {"output_tokens": 0}
                    self._emit("message_start", message=self._about | {"usage": usage})
                for step in steps:
                    self._add(step.events)
                if self._events:
                    yield self._take()
            self._close()
            usage = self._usage(generation.totals())
            self._emit("message_delta", delta=self._stop(), usage=usage)
            self._emit("message_stop")
            yield self._take()

    def _add(self, events: Sequence[Event]) -> None:
        """Adds parts to the blocks."""
        for event in events:
            match event:
                case Content(text):
                    self._grow("text", text)
                case Reasoning(text):
                    self._grow("thinking", text)
                case CallBegin(name):
                    call = {"id": f"toolu_{uuid.uuid4().hex[:24]}", "name": name, "input": {}}
                    self._open({"type": "tool_use", **call})
                case CallArguments(text):
                    self._arguments += text
                    self._delta({"type": "input_json_delta", "partial_json": text})

    def _grow(self, kind: str, text: str) -> None:
        if not (self._is_open and self._blocks[-1]["type"] == kind):
            signature = {"signature": ""} if kind == "thinking" else {}
            self._open({"type": kind, kind: "", **signature})
        self._blocks[-1][kind] += text
        self._delta({"type": f"{kind}_delta", kind: text})

    def _open(self, block: Json) -> None:
        self._close()
        self._blocks.append(block)
        self._is_open, self._arguments = True, ""
        self._emit("content_block_start", index=len(self._blocks) - 1, content_block=block)

    def _delta(self, delta: Json) -> None:
        self._emit("content_block_delta", index=len(self._blocks) - 1, delta=delta)

    def _close(self) -> None:
        if self._is_open:
            self._is_open = False
            if self._blocks[-1]["type"] == "tool_use":
                self._blocks[-1]["input"] = _object(self._arguments)
            self._emit("content_block_stop", index=len(self._blocks) - 1)

    def _emit(self, kind: str, **values: Any) -> None:
        self._events.append(named_event(kind, {"type": kind, **values}))

    def _take(self) -> bytes:
        events, self._events = b"".join(self._events), []
        return events

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
