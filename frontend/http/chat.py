"""OpenAI's chat completions: `POST /v1/chat/completions`."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Literal

from frontend.http.answers import Answers
from frontend.http.chunks import ChunkedAnswer, Json
from frontend.http.errors import ParameterError
from frontend.http.exchange import Answer, Request
from frontend.http.formats.parser import CallArguments, CallBegin, Content, Event, Reasoning
from frontend.http.parameters import CompletionFields, Int32, Items
from frontend.http.prompts import (
    ChatFields,
    Message,
    NamedTool,
    ToolChoice,
    Tools,
    chat_with_fields,
    read_tools,
)
from frontend.http.service import Service


class ChatBody(ChatFields, CompletionFields):
    """The parameters of a chat completion."""

    messages: Items[Message]
    max_tokens: Int32 | None = None
    max_completion_tokens: Int32 | None = None
    logprobs: bool | None = None
    top_logprobs: Int32 | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    # These parameters have no effect on the answer.
    modalities: list[Literal["text"]] | None = None


async def create(service: Service, request: Request) -> Answer:
    """Answers a chat."""
    body = service.read(ChatBody, request)
    tools = _tools(body)
    answers = await _start(service, request, body, tools)
    return await _Chat(service, body, answers).answer()


def _tools(body: ChatBody) -> Tools:
    given = body.tool_choice
    choice, name = (
        ("required", given.function.name) if isinstance(given, NamedTool) else (given, "")
    )
    return read_tools(
        [tool.function for tool in body.tools or ()],
        choice,
        name,
        parallel=body.parallel_tool_calls is not False,
    )


async def _start(service: Service, request: Request, body: ChatBody, tools: Tools) -> Answers:
    effort = service.effort("reasoning_effort", body.reasoning_effort)
    chat = chat_with_fields(body, body.messages, tools, service.template, effort)
    max_tokens = body.max_completion_tokens
    max_tokens = body.max_tokens if max_tokens is None else max_tokens
    message = service.chat_request(body, request, chat, max_tokens)
    if body.top_logprobs is not None and not body.logprobs:
        raise ParameterError("top_logprobs", "requires logprobs")
    if body.logprobs:
        message.sampling.logprobs = body.top_logprobs or 0
    return await service.answers(message, tools, body.truncate_prompt_tokens)


class _Chat(ChunkedAnswer):
    """Writes the answers to one chat."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"
    prefix, text_key = "chatcmpl", "delta"

    def __init__(self, service: Service, body: ChatBody, answers: Answers) -> None:
        super().__init__(service, body, [answers.generation])
        self._answers = answers
        self._shows_reasoning = body.include_reasoning is not False
        self._num_calls = [0] * self.num_choices
        self._begun: set[int] = set()  # choices whose role was sent
        self._delta(0, answers.resumed)

    async def choices(self) -> AsyncIterator[tuple[Json, Json]]:
        while not self._answers.generation.ended:
            for completion, delta, events in await self._answers.next():
                index = completion.index
                found = self.choice(index, completion, delta)
                found["delta"] = self._delta(index, events)
                if index not in self._begun:
                    self._begun.add(index)
                    found["delta"] = {"role": "assistant", "content": ""} | found["delta"]
                if found["finish_reason"] == "stop" and self._num_calls[index]:
                    found["finish_reason"] = "tool_calls"
                if delta.logprobs:
                    found["logprobs"] = {"content": self.texts.chat_entries(delta.logprobs)}
                yield found, await self.of_prompt(completion, delta, 0)

    def _delta(self, index: int, events: Sequence[Event]) -> Json:
        """The delta of new events, with at most one part of each call."""
        texts: dict[str, str] = {}
        calls: dict[int, Json] = {}
        for event in events:
            match event:
                case Content(text):
                    texts["content"] = texts.get("content", "") + text
                case Reasoning(text) if self._shows_reasoning:
                    texts["reasoning_content"] = texts.get("reasoning_content", "") + text
                case CallBegin(name):
                    calls[self._num_calls[index]] = {
                        "index": self._num_calls[index],
                        "id": f"call_{uuid.uuid4().hex}",
                        "type": "function",
                        "function": {"name": name, "arguments": ""},
                    }
                    self._num_calls[index] += 1
                case CallArguments(text):
                    number = self._num_calls[index] - 1
                    part = {"index": number, "function": {"arguments": ""}}
                    calls.setdefault(number, part)["function"]["arguments"] += text
        return texts | ({"tool_calls": [*calls.values()]} if calls else {})

    def joined(self, chunks: Sequence[Json]) -> Json:
        deltas = [chunk.pop("delta") for chunk in chunks]
        calls: list[Json] = []
        for part in (part for delta in deltas for part in delta.get("tool_calls", ())):
            if "id" in part:
                calls.append({key: part[key] for key in ("id", "type", "function")})
            else:
                calls[-1]["function"]["arguments"] += part["function"]["arguments"]
        content, reasoning = (
            "".join(delta.get(key, "") for delta in deltas)
            for key in ("content", "reasoning_content")
        )
        message: Json = {"role": "assistant", "content": content, "refusal": None}
        if calls or reasoning:
            message["content"] = content or None
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        return {"message": message}
