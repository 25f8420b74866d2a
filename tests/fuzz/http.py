"""The interfaces of the frontend and of the dashboard, over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

from tests.fuzz.corpus import Case
from tests.fuzz.http_requests import Answer, exchange, is_whole
from tests.fuzz.tally import DEADLINE_S, Tally

_MAY = (501, 503)  # besides 2xx, 3xx and 4xx


async def send_case(address: str, case: Case, tally: Tally) -> None:
    for message in case.messages:
        answer = await asyncio.to_thread(exchange, address, message, DEADLINE_S)
        tally.counts[str(answer.status or "closed")] += 1
        if answer.status >= 500 and answer.status not in _MAY:
            tally.problem(f"{answer.status}: {answer.body!r}", case)
        if not answer.status and is_whole(message):
            tally.problem("closed without an answer", case)
        for text in _errors(answer):
            tally.text(text, case)


def _errors(answer: Answer) -> Iterator[str]:
    """The texts that say what went wrong: a refusal's, or those within a stream."""
    text = answer.body.decode(errors="replace")
    if answer.status >= 400:
        yield text
    yield from (line for line in text.splitlines() if line.startswith('data: {"error"'))


_MESSAGES = [{"role": "user", "content": "Where does Anna live?"}]
_SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Rome", "Bern"]}}}
_FUNCTION = {"name": "get_weather", "description": "The weather", "parameters": _SCHEMA}
_CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
_LIMITED = {"model": "demo", "max_tokens": 4}
_CHAT = _LIMITED | {"messages": _MESSAGES}
_PROMPT = _LIMITED | {"prompt": "Once upon a time"}
_SAMPLING = {
    "temperature": 0.7,
    "top_p": 0.9,
    "n": 2,
    "seed": 7,
    "stop": ["a", "the"],
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "logit_bias": {"3": 2.0},
    "bad_words": ["the", "once upon"],
    "user": "me",
}
_TOOL = {"type": "function", "function": _FUNCTION}
_RESPONSE = {"model": "demo", "input": "Hello", "max_output_tokens": 4}
_POSTS: list[tuple[str, Any]] = [
    ("/v1/chat/completions", _CHAT | _SAMPLING | {"logprobs": True, "top_logprobs": 2}),
    ("/v1/chat/completions", _CHAT | {"stream": True, "stream_options": {"include_usage": True}}),
    ("/v1/chat/completions", _CHAT | {"tools": [_TOOL], "tool_choice": "required"}),
    (
        "/v1/chat/completions",
        _CHAT
        | {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "city", "schema": _SCHEMA},
            }
        },
    ),
    (
        "/v1/chat/completions",
        _LIMITED
        | {
            "messages": [
                {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
                *_MESSAGES,
                {"role": "assistant", "content": None, "tool_calls": [_CALL]},
                {"role": "tool", "content": "sunny", "tool_call_id": "1"},
            ]
        },
    ),
    ("/v1/completions", _PROMPT | _SAMPLING),
    ("/v1/completions", _PROMPT | {"stream": True, "ignore_eos": True, "min_p": 0.1, "top_k": 5}),
    ("/v1/completions", _PROMPT | {"regex": "[a-z]{2,5}"}),
    ("/v1/messages", _CHAT | {"system": "Be brief.", "stop_sequences": ["a"], "temperature": 0}),
    ("/v1/messages", _CHAT | {"stream": True, "metadata": {"user_id": "me"}}),
    (
        "/v1/messages",
        _CHAT
        | {
            "tools": [{"name": "get_weather", "input_schema": _SCHEMA}],
            "tool_choice": {"type": "tool", "name": "get_weather"},
        },
    ),
    ("/v1/responses", _RESPONSE | {"instructions": "Be brief.", "temperature": 0, "store": False}),
    ("/v1/responses", _RESPONSE | {"input": _MESSAGES, "stream": True}),
    ("/v1/tokenize", {"model": "demo", "prompt": "Once upon a time"}),
    ("/v1/detokenize", {"model": "demo", "tokens": [1, 2, 3]}),
]
API = [*(("POST", path, body) for path, body in _POSTS), ("GET", "/v1/models", None)]
PAGE: list[tuple[str, str, Any]] = [
    *[("POST", "/chat", {"messages": _MESSAGES})] * 4,
    ("POST", "/chat", {"messages": [{"role": "system", "content": "Be brief."}, *_MESSAGES]}),
    ("GET", "/", None),
    ("GET", "/events", None),
    ("GET", "/health", None),
    ("GET", "/static/dashboard.js", None),
]
