"""Tool calls and reasoning over HTTP: whole and streamed, in the form of each API."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from shared.sampling_params import GrammarKind
from tests.frontend.conftest import link_with_qwen3_template
from tests.frontend.fake_scheduler import FakeScheduler, Live
from tests.frontend.http.conftest import HttpService, Json

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
ASKED = [{"role": "user", "content": "What is 17 + 25?"}]
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
ARGUMENTS = '{"a": 17,  "b":25}'  # spaces as the model wrote them
CALL = f'<tool_call>\n{{"name": "add", "arguments": {ARGUMENTS}}}\n</tool_call>'
THOUGHT = "<think>\nFirst add.\n</think>\n\n"
ANSWER = f"{THOUGHT}Let me see.\n{CALL}\n{CALL}"


@pytest.fixture
def changes(tmp_path: Path) -> Json:
    """The demo model with a chat template that reasons."""
    link_with_qwen3_template(tmp_path)
    return {"model": str(tmp_path), "served_model_name": "demo"}


@pytest.fixture
async def scheduler(scheduler: FakeScheduler) -> FakeScheduler:
    scheduler.info.max_model_len = 2048
    return scheduler


def answer(service: HttpService, hf: Any, text: str) -> None:
    """Has the engine answer every request with this text, character by character or nearly so."""
    ids: list[int] = [
        token for character in text for token in hf.encode(character, add_special_tokens=False)
    ]

    def next_token(live: Live) -> int:
        return int([*ids, hf.eos_token_id][len(live.tokens)])

    service.scheduler.next_token = next_token


def tools(kind: str) -> Json:
    function = {"name": "add", "parameters": PARAMETERS}
    if kind == CHAT:
        return {"messages": ASKED, "tools": [{"type": "function", "function": function}]}
    if kind == RESPONSES:
        return {"input": ASKED, "tools": [{"type": "function", **function}]}
    anthropic = {"name": "add", "input_schema": PARAMETERS}
    return {"messages": ASKED, "tools": [anthropic], "max_tokens": 400}


async def test_a_chat(service: HttpService, hf: Any) -> None:
    answer(service, hf, ANSWER)
    (choice,) = (await service.post(CHAT, tools(CHAT)))["choices"]
    message = choice["message"]
    assert message["reasoning_content"] == "First add."
    assert message["content"] == "Let me see."
    calls = [
        (call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]
    ]
    assert calls == [("add", ARGUMENTS)] * 2
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    assert choice["finish_reason"] == "tool_calls"


async def test_a_streamed_chat(service: HttpService, hf: Any) -> None:
    answer(service, hf, ANSWER)
    async with service.opened(CHAT, tools(CHAT)) as lines:
        while service.scheduler.connection.live:
            await service.step()
        chunks = (await lines.rest())[:-1]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "First add."
    assert "".join(delta.get("content", "") for delta in deltas) == "Let me see."
    parts = [part for delta in deltas for part in delta.get("tool_calls", ())]
    assert len(parts) > 20  # arguments arrive as they are written
    for index in (0, 1):
        own = [part for part in parts if part["index"] == index]
        assert [part["function"]["name"] for part in own if "id" in part] == ["add"]
        assert "".join(part["function"]["arguments"] for part in own) == ARGUMENTS
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


async def test_a_resumed_chat_continues_within_a_call(service: HttpService, hf: Any) -> None:
    answer(service, hf, ANSWER)
    body = tools(CHAT) | {"seed": 1, "return_token_ids": True}
    ids = (await service.post(CHAT, body))["choices"][0]["token_ids"]
    cut = len(ids) - 20
    chunks = (await service.events(CHAT, body | {"resume_token_ids": ids[:cut]}))[:-1]
    parts = [p for c in chunks for p in c["choices"][0]["delta"].get("tool_calls", ())]
    assert {part["index"] for part in parts} == {1}
    assert ARGUMENTS.endswith("".join(part["function"]["arguments"] for part in parts))
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


async def test_a_response(service: HttpService, hf: Any) -> None:
    answer(service, hf, ANSWER)
    whole = await service.post(RESPONSES, tools(RESPONSES))
    thought, message, *calls = whole["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "First add."}]
    assert message["content"][0]["text"] == "Let me see."
    assert [(call["name"], call["arguments"]) for call in calls] == [("add", ARGUMENTS)] * 2
    assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    events = await service.events(RESPONSES, tools(RESPONSES))
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    last = events[-1]["response"]
    assert _without_ids(last["output"]) == _without_ids(whole["output"])


def _without_ids(items: Sequence[Json]) -> list[Json]:
    return [{key: item[key] for key in item if key not in ("id", "call_id")} for item in items]


async def test_a_message(service: HttpService, hf: Any) -> None:
    answer(service, hf, ANSWER)
    whole = await service.post(MESSAGES, tools(MESSAGES))
    thought, text, *calls = whole["content"]
    assert thought == {"type": "thinking", "thinking": "First add.", "signature": ""}
    assert text == {"type": "text", "text": "Let me see."}
    assert [(call["name"], call["input"]) for call in calls] == [("add", {"a": 17, "b": 25})] * 2
    assert whole["stop_reason"] == "tool_use"
    blocks: dict[int, str] = {}
    for event in await service.events(MESSAGES, tools(MESSAGES)):
        if event["type"] == "content_block_start":
            blocks[event["index"]] = ""
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            text_of_it = delta.get("text", delta.get("thinking", delta.get("partial_json")))
            blocks[event["index"]] += text_of_it
    assert blocks == {0: "First add.", 1: "Let me see.", 2: ARGUMENTS, 3: ARGUMENTS}


@pytest.mark.parametrize("kind", [CHAT, RESPONSES, MESSAGES])
async def test_a_forced_call_has_a_grammar(service: HttpService, hf: Any, kind: str) -> None:
    answer(service, hf, CALL)
    named: Any = {"type": "tool", "name": "add"} if kind == MESSAGES else "required"
    await service.post(kind, tools(kind) | {"tool_choice": named})
    grammar = (await service.scheduler.submits.get()).sampling.grammar
    assert GrammarKind(grammar.kind) is GrammarKind.STRUCTURAL_TAG
    assert '"add\\"' in grammar.text or '\\"add\\"' in grammar.text
    assert json.loads(grammar.text)["format"]["type"] == "tags_with_separator"


async def test_without_tools_calls_are_text(service: HttpService, hf: Any) -> None:
    answer(service, hf, f"Write {CALL}, or <think> twice.")
    (choice,) = (await service.post(CHAT, {"messages": ASKED}))["choices"]
    assert choice["message"]["content"] == f"Write {CALL}, or <think> twice."
    body = tools(CHAT) | {"tool_choice": "none"}
    assert CALL in (await service.post(CHAT, body))["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "sub"}}}, "tool_choice"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice"),
        (
            {"tool_choice": "required", "structured_outputs": {"regex": "a"}},
            "tool_choice",
        ),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ],
)
async def test_tools_that_cannot_be_called(service: HttpService, body: Json, param: str) -> None:
    status, found = await service.error(CHAT, tools(CHAT) | body)
    assert (status, found["error"]["param"]) == (400, param)
