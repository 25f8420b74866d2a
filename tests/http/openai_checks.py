"""OpenAI's own client, as its users call it."""

from __future__ import annotations

import json
from typing import Any

from openai import OpenAI

MESSAGES: Any = [{"role": "user", "content": "Where does Anna live?"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Bern"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
SUM: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


def client(given: Any, **options: Any) -> OpenAI:
    return OpenAI(base_url=given["url"] + "/v1", api_key="none", **{"max_retries": 0} | options)


def chat(given: Any, **options: Any) -> Any:
    defaults = {"model": "demo", "messages": MESSAGES, "max_tokens": 12, "temperature": 0}
    return client(given).chat.completions.create(**defaults | options)


def complete(given: Any, **options: Any) -> Any:
    defaults = {"model": "demo", "prompt": given["prompt"], "max_tokens": 20, "temperature": 0}
    return client(given).completions.create(**defaults | options)


def check_models(given: Any) -> None:
    assert [model.id for model in client(given).models.list()] == ["demo"]


def check_embeddings(given: Any) -> None:
    """The client asks for base64 by default, and decodes it; numbers are the other form."""
    create = client(given).embeddings.create
    for options in ({}, {"encoding_format": "float"}):
        found = create(model="demo", input=[given["prompt"], "another"], **options)
        assert max_difference(found.data[0].embedding, given["embedding"]) < 1e-5
        assert [each.index for each in found.data] == [0, 1]
        assert found.usage.prompt_tokens > given["prompt_tokens"]
    (short,) = create(model="demo", input=given["prompt"], dimensions=16).data
    assert len(short.embedding) == 16


def max_difference(found: list[float], expected: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(found, expected, strict=True))


def check_completion(given: Any) -> None:
    whole = complete(given)
    assert whole.choices[0].text == given["completion"]
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 20
    assert whole.usage.prompt_tokens == given["prompt_tokens"]


def check_streamed_completion(given: Any) -> None:
    chunks = list(complete(given, stream=True, stream_options={"include_usage": True}))
    assert len(chunks) > 3
    text = "".join(choice.text for chunk in chunks for choice in chunk.choices)
    assert text == given["completion"]
    assert [chunk.usage.completion_tokens for chunk in chunks if chunk.usage][-1] == 20


def check_chat(given: Any) -> None:
    whole = chat(given, max_tokens=None)
    assert whole.choices[0].message.content == given["answer"]
    assert whole.choices[0].finish_reason == "stop"


def check_streamed_chat(given: Any) -> None:
    chunks = list(chat(given, max_tokens=None, stream=True, stream_options={"include_usage": True}))
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert "".join(choice.delta.content or "" for choice in choices) == given["answer"]
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["stop"]
    usage = chunks[-1].usage
    assert usage.completion_tokens == chat(given, max_tokens=None).usage.completion_tokens
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def check_seed_and_n(given: Any) -> None:
    def sample(**options: Any) -> list[str]:
        whole = complete(given, temperature=1.5, seed=11, **options)
        return [choice.text for choice in whole.choices]

    three = sample(n=3)
    assert three == sample(n=3)
    assert len(set(three)) == 3
    assert three[:1] == sample()


def check_streamed_n(given: Any) -> None:
    texts = ["", ""]
    for chunk in complete(given, temperature=1.5, seed=11, n=2, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    whole = complete(given, temperature=1.5, seed=11, n=2)
    assert texts == [choice.text for choice in whole.choices]


def check_stop(given: Any) -> None:
    word = given["completion"].split()[2]
    before = given["completion"].split(word)[0]
    for stop in (word, ["zzz", word]):
        choice = complete(given, stop=stop).choices[0]
        assert (choice.text, choice.finish_reason) == (before, "stop")
    streamed = complete(given, stop=word, stream=True)
    assert "".join(c.text for chunk in streamed for c in chunk.choices) == before


def check_logprobs(given: Any) -> None:
    content = chat(given, logprobs=True, top_logprobs=3).choices[0].logprobs.content
    assert given["answer"].startswith("".join(entry.token for entry in content))
    for entry in content:
        assert entry.logprob <= 0
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].token == entry.token  # greedy
    streamed = chat(given, logprobs=True, top_logprobs=3, stream=True)
    entries = [
        entry
        for chunk in streamed
        for choice in chunk.choices
        if choice.logprobs
        for entry in choice.logprobs.content
    ]
    assert [entry.token for entry in entries] == [entry.token for entry in content]


def check_json_schema(given: Any) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 1, "maximum": 3}},
        "required": ["n"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}
    choice = chat(given, response_format=form, max_tokens=200, temperature=1, seed=1).choices[0]
    assert choice.finish_reason == "stop"
    assert json.loads(choice.message.content)["n"] in (1, 2, 3)


def calls_of(given: Any, **options: Any) -> list[tuple[str, Any]]:
    """The calls of an answer, which are the same if it is streamed."""
    asked = {"tools": [WEATHER, SUM], "max_tokens": 100} | options
    choice = chat(given, **asked).choices[0]
    calls = [
        (call.function.name, json.loads(call.function.arguments))
        for call in choice.message.tool_calls
    ]
    assert choice.finish_reason == "tool_calls"
    streamed: dict[int, list[str]] = {}
    for chunk in chat(given, **asked, stream=True):
        for delta in (choice.delta for choice in chunk.choices):
            for call in delta.tool_calls or ():
                name, arguments = streamed.setdefault(call.index, ["", ""])
                streamed[call.index] = [
                    name + (call.function.name or ""),
                    arguments + (call.function.arguments or ""),
                ]
    assert [(name, json.loads(arguments)) for name, arguments in streamed.values()] == calls
    return calls


def check_tools(given: Any) -> None:
    expected = {
        "What is the weather in Rome?": ("get_weather", {"city": "Rome"}),
        "What is 17 + 25?": ("add", {"a": 17, "b": 25}),
    }
    for question, call in expected.items():
        messages = [{"role": "user", "content": question}]
        named = {"type": "function", "function": {"name": call[0]}}
        for choice in ("auto", named, "required"):
            assert calls_of(given, messages=messages, tool_choice=choice) == [call], choice


def check_forced_tool(given: Any) -> None:
    messages = [{"role": "user", "content": "What is the weather in Rome?"}]
    named = {"type": "function", "function": {"name": "get_weather"}}
    one = {"tool_choice": "required", "tools": [WEATHER], "parallel_tool_calls": False}
    for options in ({"tool_choice": named}, one):
        ((name, arguments),) = calls_of(given, messages=messages, **options)
        assert name == "get_weather"
        assert arguments["city"] in ("Rome", "Bern")


def check_tools_not_called(given: Any) -> None:
    choice = chat(given, tools=[WEATHER, SUM], max_tokens=None).choices[0]
    assert not choice.message.tool_calls
    assert choice.message.content
    assert choice.finish_reason == "stop"


def check_tools_of_a_stream(given: Any) -> None:
    """OpenAI's own reader of streams joins the parts of calls."""
    asked: Any = {
        "model": "demo",
        "messages": [{"role": "user", "content": "What is the weather in Rome?"}],
        "tools": [WEATHER, SUM],
        "temperature": 0,
    }
    with client(given).chat.completions.stream(**asked) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        final = stream.get_final_completion().choices[0]
    assert [(event.name, json.loads(event.arguments)) for event in done] == [
        ("get_weather", {"city": "Rome"})
    ]
    assert final.finish_reason == "tool_calls"
    (call,) = final.message.tool_calls
    # The answer to the tool's output.
    asked["messages"] += [
        {"role": "assistant", "content": None, "tool_calls": [call.to_dict()]},
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
    ]
    answer = client(given).chat.completions.create(**asked)
    assert "Rome" in answer.choices[0].message.content


def check_further_parameters(given: Any) -> None:
    """vLLM's parameters, which OpenAI's API lacks."""
    colors = {"structured_outputs": {"choice": ["red", "blue"]}}
    assert chat(given, extra_body=colors).choices[0].message.content in ("red", "blue")
    ids: Any = {"return_token_ids": True}
    choice = complete(given, logprobs=0, extra_body=ids | {"prompt_logprobs": 1}).choices[0]
    assert len(choice.prompt_logprobs) == given["prompt_tokens"]
    rest = complete(
        given, max_tokens=20, extra_body=ids | {"resume_token_ids": choice.token_ids[:8]}
    ).choices[0]
    assert choice.token_ids[8:] == rest.token_ids
    assert choice.text.endswith(rest.text)
    banned = complete(given, logprobs=0, extra_body={"bad_words": ["a", "."]}).choices[0]
    assert not {"a", " a", ".", " ."} & {*banned.logprobs.tokens}
    assert {" a", "."} & {*choice.logprobs.tokens}


def check_responses(given: Any) -> None:
    user = client(given)
    response = user.responses.create(model="demo", input=MESSAGES[0]["content"], temperature=0)
    assert response.output_text == given["answer"]
    events = user.responses.create(
        model="demo", input=MESSAGES[0]["content"], temperature=0, stream=True
    )
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == given["answer"]
