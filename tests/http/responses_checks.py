"""OpenAI's responses, with its own client."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import partial
from typing import Any

import openai
from checks import refusal_of, valid
from openai import OpenAI
from pydantic import BaseModel

QUESTION, SUM, STORY = "Where does Anna live?", "What is 17 + 25?", "Tell me a story about a fox."
ADD: Any = {
    "type": "function",
    "name": "add",
    "description": "Add two numbers.",
    "strict": None,
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}


class Answer(BaseModel):
    answer: int


def client(given: Any) -> OpenAI:
    return OpenAI(base_url=given["url"] + "/v1", api_key="none", max_retries=0)


def create(given: Any, question: Any = QUESTION, **options: Any) -> Any:
    asked = {"model": "demo", "input": question, "temperature": 0} | options
    made = client(given).responses.create(**asked)
    return events_of(made) if options.get("stream") else valid(made)


def events_of(stream: Iterable[Any], first: int = 0) -> list[Any]:
    """All events of a stream, which are numbered."""
    events = [valid(event) for event in stream]
    assert [event.sequence_number for event in events] == [*range(first, first + len(events))]
    return events


def told(events: list[Any]) -> list[Any]:
    """The output that the events of a response build; those that end a part have it whole."""
    output: list[Any] = []
    for event in events:
        match event.type.removeprefix("response."):
            case "output_item.added":
                assert event.output_index == len(output)
                output.append(event.item.to_dict())
            case "content_part.added":
                assert event.content_index == len(output[-1]["content"])
                output[-1]["content"].append(event.part.to_dict())
            case "output_text.delta":
                part = output[event.output_index]["content"][event.content_index]
                part["text"] += event.delta
                part["logprobs"] += [entry.to_dict() for entry in event.logprobs]
            case "function_call_arguments.delta":
                output[event.output_index]["arguments"] += event.delta
            case "output_text.done":
                assert event.text == output[-1]["content"][-1]["text"]
            case "function_call_arguments.done":
                assert (event.name, event.arguments) == (
                    output[-1]["name"],
                    output[-1]["arguments"],
                )
            case "content_part.done":
                assert event.part.to_dict() == output[-1]["content"][-1]
            case "output_item.done":
                output[-1]["status"] = event.item.status
                assert event.item.to_dict() == output[-1]
        if hasattr(event, "item_id"):
            assert event.item_id == output[event.output_index]["id"]
    return output


def final(events: list[Any]) -> Any:
    """The response of the last event. The events before it told its output."""
    first, second, *_, last = events
    assert (first.type, second.type) == ("response.created", "response.in_progress")
    assert (second.response.status, second.response.output) == ("in_progress", [])
    assert last.response.to_dict()["output"] == told(events)
    return last.response


def same(response: Any) -> Any:
    """A response without what differs each time."""
    text = json.dumps(response.to_dict() | {"created_at": 0})
    return json.loads(text.replace(response.id.removeprefix("resp_"), "ID"))


def check_text(given: Any) -> None:
    options: Any = {"instructions": "Be brief.", "metadata": {"key": "value"}}
    whole = create(given, **options)
    (message,) = whole.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    assert (whole.status, whole.store, whole.background) == ("completed", False, False)
    assert (whole.instructions, whole.metadata) == ("Be brief.", {"key": "value"})
    chat: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
    completion = client(given).chat.completions.create(model="demo", messages=chat, temperature=0)
    assert whole.output_text == completion.choices[0].message.content
    used, expected = whole.usage, completion.usage
    assert expected is not None
    counts = (expected.prompt_tokens, expected.completion_tokens, expected.total_tokens)
    assert (used.input_tokens, used.output_tokens, used.total_tokens) == counts
    events = create(given, **options, stream=True)
    assert events[-1].type == "response.completed"
    assert same(final(events)) == same(whole)
    assert create(given).output_text == given["answer"]


def check_the_streams_helper(given: Any) -> None:
    ask = partial(client(given).responses.stream, model="demo", temperature=0)
    with ask(input=QUESTION) as stream:
        texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
        assert "".join(texts) == stream.get_final_response().output_text == given["answer"]
    with ask(input=SUM, text_format=Answer) as stream:
        assert stream.get_final_response().output_parsed == Answer(answer=42)


def check_cut(given: Any) -> None:
    whole = create(given, max_output_tokens=4)
    assert (whole.status, whole.output[0].status) == ("incomplete", "incomplete")
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert whole.usage.output_tokens == 4
    events = create(given, max_output_tokens=4, stream=True)
    assert events[-1].type == "response.incomplete"
    assert same(final(events)) == same(whole)


def check_logprobs(given: Any) -> None:
    options = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    whole = create(given, **options)
    entries = whole.output[0].content[0].logprobs
    shown = [entry for entry in entries if entry.bytes]
    assert "".join(entry.token for entry in shown) == given["answer"]
    for entry in entries:
        assert len(entry.top_logprobs) == 2
        assert entry.top_logprobs[0].token == entry.token  # greedy
    assert len(entries) == whole.usage.output_tokens
    assert same(final(create(given, **options, stream=True))) == same(whole)


def check_tools(given: Any) -> None:
    whole = create(given, SUM, tools=[ADD])
    (call,) = whole.output
    assert (call.type, call.name, call.status) == ("function_call", "add", "completed")
    assert json.loads(call.arguments) == {"a": 17, "b": 25}
    assert whole.tools[0].to_dict() == ADD
    assert same(final(create(given, SUM, tools=[ADD], stream=True))) == same(whole)
    asked = [{"role": "user", "content": SUM}, call.to_dict()]
    asked += [{"type": "function_call_output", "call_id": call.call_id, "output": "42"}]
    assert create(given, asked, tools=[ADD]).output_text == "17 + 25 = 42."
    for choice in ("required", {"type": "function", "name": "add"}):
        forced = create(given, SUM, tools=[ADD], tool_choice=choice)
        assert json.loads(forced.output[0].arguments) == {"a": 17, "b": 25}
        found = forced.tool_choice
        assert (found if isinstance(found, str) else found.to_dict()) == choice
    free = create(given, SUM, tools=[ADD], tool_choice="none")
    assert [item.type for item in free.output] == ["message"]


def check_json_schema(given: Any) -> None:
    schema = {
        "type": "object",
        "properties": {"answer": {"type": "integer"}},
        "required": ["answer"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "name": "answer", "strict": True, "schema": schema}
    whole = create(given, SUM, text={"format": form})
    assert json.loads(whole.output_text) == {"answer": 42}
    assert whole.text.format.to_dict() == form
    assert same(final(create(given, SUM, text={"format": form}, stream=True))) == same(whole)
    assert json.loads(create(given, SUM, text={"format": {"type": "json_object"}}).output_text)
    parse = client(given).responses.parse
    parsed = parse(model="demo", input=SUM, text_format=Answer, temperature=0)
    assert parsed.output_parsed == Answer(answer=42)


def check_earlier_answers(given: Any) -> None:
    """Items of one response are input of the next."""
    first = create(given, "My name is Tom.")
    asked: Any = [{"role": "user", "content": "My name is Tom."}]
    asked += [item.to_dict() for item in first.output]
    asked += [{"role": "user", "content": [{"type": "input_text", "text": "What is my name?"}]}]
    assert "Tom" in create(given, asked).output_text


def check_background(given: Any) -> None:
    begun = create(given, STORY, background=True, max_output_tokens=200)
    assert begun.status in ("queued", "in_progress")
    assert (begun.background, begun.store) == (True, True)
    retrieve = client(given).responses.retrieve
    events = events_of(retrieve(begun.id, stream=True))
    first, second, *_, last = events
    assert (first.response.status, second.response.status) == ("queued", "in_progress")
    for after in (0, 5, len(events) - 2):
        rest = events_of(retrieve(begun.id, stream=True, starting_after=after), after + 1)
        assert rest == events[after + 1 :]
    assert list(retrieve(begun.id, stream=True, starting_after=len(events))) == []
    done = valid(retrieve(begun.id))
    assert done == last.response == final(events)
    whole = create(given, STORY, max_output_tokens=200)
    stored = {"background": True, "store": True}
    assert same(done) == same(whole) | stored


def check_background_that_calls(given: Any) -> None:
    options = {"tools": [ADD], "background": True, "stream": True}
    (call,) = final(create(given, SUM, **options)).output
    assert (call.name, json.loads(call.arguments)) == ("add", {"a": 17, "b": 25})


def check_a_stream_cut_in_the_background(given: Any) -> None:
    user = client(given)
    asked: Any = {"model": "demo", "input": STORY, "temperature": 1, "seed": 7}
    extra = {"seed": asked.pop("seed")}
    begun = []
    with user.responses.create(**asked, background=True, stream=True, extra_body=extra) as stream:
        for event in stream:
            begun.append(event)
            if len(begun) == 9:
                break
    response = begun[0].response.id
    rest = user.responses.retrieve(response, stream=True, starting_after=8)
    events = [*begun, *events_of(rest, 9)]
    assert final(events) == user.responses.retrieve(response)
    whole: Any = user.responses.create(**asked, extra_body=extra)
    assert events[-1].response.output_text == whole.output_text


def check_cancel(given: Any) -> None:
    options = {"background": True, "extra_body": {"ignore_eos": True}}
    begun = create(given, STORY, **options, max_output_tokens=1900)
    user = client(given).responses
    assert valid(user.cancel(begun.id)).status == "cancelled"
    last = events_of(user.retrieve(begun.id, stream=True))[-1]
    assert last.response.status == "cancelled"
    assert last.response == valid(user.retrieve(begun.id)) == valid(user.cancel(begun.id))


def check_input_items(given: Any) -> None:
    asked = [{"role": "user", "content": SUM}, {"role": "user", "content": QUESTION}]
    begun = create(given, asked, background=True)
    items = client(given).responses.input_items.list
    texts = [item.content[0].text for item in items(begun.id, order="asc")]
    assert texts == [SUM, QUESTION]
    assert [item.content[0].text for item in items(begun.id)] == [QUESTION, SUM]
    assert len({valid(item).id for item in items(begun.id)}) == 2


def check_delete(given: Any) -> None:
    begun, user = create(given, background=True), client(given).responses
    user.delete(begun.id)
    for call in (user.retrieve, user.cancel, user.delete, user.input_items.list):
        assert "404" in refusal_of(openai.NotFoundError, partial(call, begun.id))
    # Other responses are not stored.
    whole = create(given)
    assert "404" in refusal_of(openai.NotFoundError, partial(user.retrieve, whole.id))


def check_errors(given: Any) -> None:
    image = [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]
    wrong: list[tuple[Any, str]] = [
        ({"temperature": 9}, "temperature"),
        ({"question": image}, "input[0].content[0]"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"background": True, "store": False}, "store"),
    ]
    for options, param in wrong:
        for stream in (False, True):
            found = ("", "")
            try:
                create(given, **options, stream=stream)
            except openai.BadRequestError as error:
                found = str(error.param), str(error.type)
            assert found == (param, "invalid_request_error"), options
