"""Anthropic's own client, as its users call it."""

from __future__ import annotations

from typing import Any

import anthropic
from anthropic import Anthropic
from checks import refusal_of, valid

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


def check_models(given: Any) -> None:
    (model,) = client(given).models.list()
    assert (model.id, model.type, model.display_name) == ("demo", "model", "demo")
    assert client(given).models.retrieve("demo") == model


def check_streamed_tool(given: Any) -> None:
    asked = ASKED | {"messages": [{"role": "user", "content": "What is the weather in Rome?"}]}
    with client(given).messages.stream(**asked, tools=[WEATHER]) as stream:
        parts = [event.partial_json for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    assert len(parts) > 1
    (used,) = valid(final).content
    assert (used.name, used.input, final.stop_reason) == (
        "get_weather",
        {"city": "Rome"},
        "tool_use",
    )
    whole = client(given).messages.create(**asked, tools=[WEATHER])
    assert [(block.name, block.input) for block in whole.content] == [(used.name, used.input)]
    # The answer to the tool's output.
    asked["messages"] = [
        *asked["messages"],
        {"role": "assistant", "content": final.content},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": used.id, "content": "sunny"}],
        },
    ]
    answer = valid(client(given).messages.create(**asked, tools=[WEATHER]))
    assert answer.stop_reason == "end_turn"
    assert "Rome" in answer.content[0].text


def check_beginning_of_the_answer(given: Any) -> None:
    begin = given["answer"].partition(" ")[0]
    asked = ASKED | {"messages": [*MESSAGES, {"role": "assistant", "content": begin}]}
    message = client(given).messages.create(**asked)
    assert begin + message.content[0].text == given["answer"]


def check_blocks_and_their_tokens(given: Any) -> None:
    """System texts and messages in blocks are one prompt with those in strings."""
    blocks = [{"type": "text", "text": MESSAGES[0]["content"]}]
    system: Any = [
        {"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}},
    ]
    asked: Any = {"model": "demo", "messages": [{"role": "user", "content": blocks}]}
    counted = client(given).messages.count_tokens(**asked, system=system)
    plain = client(given).messages.count_tokens(model="demo", messages=MESSAGES, system="Be kind.")
    assert counted == plain
    message = client(given).messages.create(
        **asked,
        system=system,
        max_tokens=2,
        thinking={"type": "disabled"},
        metadata={"user_id": "u"},
    )
    assert valid(message).usage.input_tokens == counted.input_tokens


def check_refusal(given: Any) -> None:
    create = client(given).messages.create
    long = ASKED | {"max_tokens": 100_000, "timeout": 60}
    assert "max_tokens" in refusal_of(anthropic.BadRequestError, lambda: create(**long))
