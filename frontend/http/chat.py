"""OpenAI's chat completions: `POST /v1/chat/completions`."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import closing
from typing import Any, Literal

import orjson

from frontend.generation import CompletionReader
from frontend.http.answers import (
    Answers,
    Step,
    TokenTexts,
    finish_reason,
    usage,
)
from frontend.http.exchange import Answer, Request
from frontend.http.formats import CallArguments, CallBegin, Content, Event, Reasoning
from frontend.http.parameters import (
    Int32,
    Items,
    SamplingFields,
    StreamOptions,
    generate_request,
    read_body,
)
from frontend.http.prompts import (
    Message,
    NamedTool,
    Tool,
    ToolChoice,
    Tools,
    chat_messages,
    chat_of,
    force_calls,
    read_tools,
)
from frontend.http.service import Service, now
from shared.errors import InvalidArgumentError


class ChatBody(SamplingFields):
    """The parameters of a chat completion."""

    messages: Items[Message]
    model: str | None = None
    max_tokens: Int32 | None = None
    max_completion_tokens: Int32 | None = None
    logprobs: bool | None = None
    top_logprobs: Int32 | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    tools: Items[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    include_reasoning: bool | None = None
    # These parameters have no effect on the answer.
    store: bool | None = None
    modalities: list[Literal["text"]] | None = None


async def create(service: Service, request: Request) -> Answer:
    """Answers a chat.

    Raises:
        ServiceError: a parameter is wrong, or the request failed.
    """
    body = read_body(ChatBody, request.body)
    service.check_model(body.model)
    tools = _tools(body)
    answers = await _start(service, request, body, tools)
    chat = _Chat(service, body, answers)
    return chat.stream() if body.stream else await chat.whole()


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
    message = await generate_request(body, service.generations.tokenizer)
    message.request_id = request.request_id or message.request_id
    continues = bool(body.continue_final_message)
    if body.add_generation_prompt is continues:
        raise InvalidArgumentError(
            "add_generation_prompt", "must be the opposite of continue_final_message"
        )
    template = service.template
    kwargs = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        kwargs |= service.effort("reasoning_effort", body.reasoning_effort)
    message.chat.CopyFrom(
        chat_of(chat_messages(body.messages), tools, template, kwargs, continues=continues)
    )
    sampling = message.sampling
    max_tokens = body.max_completion_tokens
    if (max_tokens := body.max_tokens if max_tokens is None else max_tokens) is not None:
        sampling.max_tokens = max_tokens
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidArgumentError("top_logprobs", "requires logprobs")
    if body.logprobs:
        sampling.logprobs = body.top_logprobs or 0
    force_calls(sampling, tools, template)
    return await service.answers(message, tools, body.truncate_prompt_tokens)


# The parts of a chunk's choice without which there is no chunk.
_SHOWN = ("delta", "logprobs", "finish_reason", "token_ids")


class _Choice:
    """The parts of one completion so far."""

    def __init__(self) -> None:
        self.begun = False  # whether its role was sent
        self.num_calls = 0
        self.content: list[str] = []
        self.reasoning: list[str] = []
        self.calls: list[dict[str, Any]] = []

    def delta(self, events: Sequence[Event]) -> dict[str, Any]:
        """The delta of new events, at most one for each call."""
        content, reasoning = "", ""
        calls: dict[int, dict[str, Any]] = {}
        for event in events:
            match event:
                case Content(text):
                    content += text
                case Reasoning(text):
                    reasoning += text
                case CallBegin(name):
                    calls[self.num_calls] = {
                        "index": self.num_calls,
                        "id": f"call_{uuid.uuid4().hex}",
                        "type": "function",
                        "function": {"name": name, "arguments": ""},
                    }
                    self.num_calls += 1
                case CallArguments(text):
                    index = self.num_calls - 1
                    new = {"index": index, "function": {"arguments": ""}}
                    calls.setdefault(index, new)["function"]["arguments"] += text
        found: dict[str, Any] = {}
        if content:
            found["content"] = content
        if reasoning:
            found["reasoning_content"] = reasoning
        if calls:
            found["tool_calls"] = [*calls.values()]
        return found

    def add(self, delta: dict[str, Any]) -> None:
        """Adds a delta to the whole message."""
        self.content.append(delta.get("content", ""))
        self.reasoning.append(delta.get("reasoning_content", ""))
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                self.calls.append(call | {"parts": []})
            self.calls[call["index"]]["parts"].append(call["function"]["arguments"])

    def message(self) -> dict[str, Any]:
        content, reasoning = "".join(self.content), "".join(self.reasoning)
        calls = [
            {
                "id": call["id"],
                "type": "function",
                "function": {
                    "name": call["function"]["name"],
                    "arguments": "".join(call["parts"]),
                },
            }
            for call in self.calls
        ]
        found: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if calls or reasoning:
            found["content"] = content or None
        if reasoning:
            found["reasoning_content"] = reasoning
        if calls:
            found["tool_calls"] = calls
        return found


class _Chat:
    """Writes the answers to one chat."""

    def __init__(self, service: Service, body: ChatBody, answers: Answers) -> None:
        self._service = service
        self._body = body
        self._answers = answers
        self._generation = answers.generation
        request = self._generation.request
        self._choices = [_Choice() for _ in range(request.sampling.num_completions)]
        self._choices[0].delta(answers.resumed)
        self._texts = TokenTexts(
            service.generations.tokenizer.vocabulary.tokens,
            as_ids=bool(body.return_tokens_as_token_ids),
        )
        self._about = {
            "id": f"chatcmpl-{request.request_id}",
            "object": "chat.completion.chunk" if body.stream else "chat.completion",
            "created": now(),
            "model": service.model,
        }

    async def whole(self) -> bytes:
        generation, body = self._generation, self._body
        logprobs: list[list[Any]] = [[] for _ in self._choices]
        token_ids: list[list[int]] = [[] for _ in self._choices]
        prompt: dict[str, Any] = {}
        readers: dict[int, CompletionReader] = {}
        with closing(generation):
            while not generation.ended:
                for step in await self._answers.next():
                    index = step.completion.index
                    readers[index] = step.completion
                    self._choices[index].add(self._delta(step))
                    logprobs[index] += self._texts.chat_entries(step.delta.logprobs)
                    token_ids[index] += step.delta.token_ids
                    prompt |= await self._of_prompt(step)
        choices = []
        for index, choice in enumerate(self._choices):
            found = {
                "index": index,
                "message": choice.message(),
                "logprobs": {"content": logprobs[index]} if body.logprobs else None,
            }
            found |= self._end(readers[index])
            if body.return_token_ids:
                found["token_ids"] = token_ids[index]
            choices.append(found)
        return orjson.dumps(self._about | {"choices": choices, "usage": self._usage()} | prompt)

    async def stream(self) -> AsyncIterator[bytes]:
        generation = self._generation
        options = self._body.stream_options or StreamOptions()
        # The part that all chunks share is written once.
        head = b"data: %s," % orjson.dumps(self._about)[:-1]
        with closing(generation):
            while not generation.ended:
                chunks = []
                for step in await self._answers.next():
                    choice = self._chunk(step)
                    rest = {"choices": [choice]} | await self._of_prompt(step)
                    if options.continuous_usage_stats:
                        rest["usage"] = self._usage()
                    elif options.include_usage:
                        rest["usage"] = None
                    if any(choice[name] for name in _SHOWN):
                        chunks.append(b"%s%s\n\n" % (head, orjson.dumps(rest)[1:]))
                if chunks:
                    yield b"".join(chunks)
            if options.include_usage:
                last = orjson.dumps({"choices": [], "usage": self._usage()})
                yield b"%s%s\n\n" % (head, last[1:])
            yield b"data: [DONE]\n\n"

    def _chunk(self, step: Step) -> dict[str, Any]:
        """A choice of a chunk."""
        completion = step.completion
        choice = self._choices[completion.index]
        delta = self._delta(step)
        if not choice.begun:
            choice.begun = True
            delta = {"role": "assistant", "content": ""} | delta
        found: dict[str, Any] = {"index": completion.index, "delta": delta, "logprobs": None}
        if step.delta.logprobs:
            found["logprobs"] = {"content": self._texts.chat_entries(step.delta.logprobs)}
        found |= self._end(completion)
        found["token_ids"] = step.delta.token_ids if self._body.return_token_ids else None
        return found

    def _delta(self, step: Step) -> dict[str, Any]:
        delta = self._choices[step.completion.index].delta(step.events)
        if self._body.include_reasoning is False:
            delta.pop("reasoning_content", None)
        return delta

    def _end(self, completion: CompletionReader) -> dict[str, Any]:
        reason = finish_reason(completion)
        if reason == "stop" and self._choices[completion.index].num_calls:
            reason = "tool_calls"
        stop_reason = completion.ending.stop_reason if completion.ending else None
        return {"finish_reason": reason, "stop_reason": stop_reason}

    async def _of_prompt(self, step: Step) -> dict[str, Any]:
        """What a response tells of the prompt, once."""
        found: dict[str, Any] = {}
        if step.delta.prompt_logprobs:
            rows, step.delta.prompt_logprobs = step.delta.prompt_logprobs, ()
            on_thread = self._service.generations.tokenizer.on_thread
            found["prompt_logprobs"] = await on_thread(lambda: self._texts.prompt_rows(rows))
        first = step.completion.index == 0 and step.delta.offset == 0
        if self._body.return_token_ids and first and step.delta.token_ids:
            found["prompt_token_ids"] = list(self._generation.request.prompt_ids)
        return found

    def _usage(self) -> dict[str, Any]:
        return usage([self._generation.totals()], reports_cached=self._service.reports_cached)
