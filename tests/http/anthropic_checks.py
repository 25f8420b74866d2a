"""Anthropic's own client, as its users call it."""

from __future__ import annotations

from typing import Any

import anthropic
from anthropic import Anthropic
from checks import refusal_of

MESSAGES: Any = [{"role": "user", "content": "Where does Anna live?"}]
WEATHER: Any = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Bern"]}},
        "required": ["city"],
    },
}
ASKED: Any = {
    "model": "demo",
    "max_tokens": 100,
    "messages": MESSAGES,
    "extra_body": {"temperature": 0},
}


def client(given: Any) -> Anthropic:
    return Anthropic(base_url=given["url"], api_key="none", max_retries=0)


def check_message(given: Any) -> None:
    message = client(given).messages.create(**ASKED)
    assert message.content[0].text == given["answer"]
    assert message.stop_reason == "end_turn"
    assert message.usage.output_tokens > 5
    cut = client(given).messages.create(**ASKED | {"max_tokens": 3})
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 3)


def check_stream(given: Any) -> None:
    with client(given).messages.stream(**ASKED) as stream:
        texts = list(stream.text_stream)
        final = stream.get_final_message()
    assert len(texts) > 3
    assert "".join(texts) == given["answer"] == final.content[0].text
    assert final.stop_reason == "end_turn"


def check_stop_sequences(given: Any) -> None:
    stop = " " + given["answer"].split()[2]
    message = client(given).messages.create(**ASKED | {"stop_sequences": [stop]})
    assert message.content[0].text == given["answer"].split(stop)[0]
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)


def check_named_tool(given: Any) -> None:
    choice = {"type": "tool", "name": "get_weather"}
    message = client(given).messages.create(**ASKED, tools=[WEATHER], tool_choice=choice)
    (used,) = [block for block in message.content if block.type == "tool_use"]
    assert used.name == "get_weather"
    assert used.input["city"] in ("Rome", "Bern")
    assert message.stop_reason == "tool_use"


def check_refusal(given: Any) -> None:
    create = client(given).messages.create
    long = ASKED | {"max_tokens": 100_000, "timeout": 60}
    assert "max_tokens" in refusal_of(anthropic.BadRequestError, lambda: create(**long))
