"""The prompts of chats in all of their forms: their tokens are those of gRPC's chats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from frontend.settings import FrontendSettings
from nano_vllm_grpc.pb import frontend_pb2 as pb
from tests.frontend.conftest import link_with_qwen3_template
from tests.frontend.http.conftest import HttpService, Json

USER = {"role": "user", "content": "hi"}
FUNCTION = {"name": "f", "description": "adds", "parameters": {"type": "object", "z": 1, "a": 2}}
SHOWN = (
    '{"type":"function","function":{"name":"f","description":"adds",'
    '"parameters":{"type":"object","z":1,"a":2}}}'
)


def message(role: str, content: str = "", **fields: Any) -> pb.ChatMessage:
    return pb.ChatMessage(role=role, content=content, **fields)


def call(call_id: str, arguments: str) -> pb.ToolCall:
    return pb.ToolCall(id=call_id, function=pb.FunctionCall(name="f", arguments=arguments))


def chat(*messages: pb.ChatMessage, **fields: Any) -> pb.Chat:
    return pb.Chat(messages=messages, **fields)


@pytest.fixture
def settings(settings: FrontendSettings, tmp_path: Path) -> FrontendSettings:
    """The demo model with the chat template of Qwen3, which reads thoughts."""
    link_with_qwen3_template(tmp_path)
    return settings.model_copy(update={"model": str(tmp_path), "served_model_name": "demo"})


async def check(service: HttpService, path: str, body: Json, expected: pb.Chat) -> None:
    """Asserts that a request has the prompt of a chat over gRPC."""
    name = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    await service.post(path, {name: 1, **body})
    submit = service.scheduler.submits.get_nowait()
    tokenized = await service.stub.Tokenize(pb.TokenizeRequest(chat=expected))
    assert np.frombuffer(submit.prompt_ids, "<i4").tolist() == list(tokenized.token_ids)


@pytest.fixture(autouse=True)
def long_prompts(scheduler: Any) -> None:
    scheduler.info.max_model_len = 1000


def assistant(*calls: Json, **fields: Any) -> Json:
    return {"role": "assistant", **fields, "tool_calls": list(calls)}


def of_chat(arguments: Any) -> Json:
    return {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}


CHATS: list[tuple[list[Json], list[pb.ChatMessage]]] = [
    ([{"role": "system", "content": "s"}, USER], [message("system", "s"), message("user", "hi")]),
    (
        [{"role": "developer", "content": "s"}, USER],
        [message("system", "s"), message("user", "hi")],
    ),
    (
        [
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            }
        ],
        [message("user", "a\nb")],
    ),
    ([{"role": "user", "content": [], "name": "n"}], [message("user", "")]),
    (
        [USER, {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}, USER],
        [message("user", "hi"), message("assistant", "no"), message("user", "hi")],
    ),
    *(
        (
            [
                USER,
                assistant(of_chat(arguments)),
                {"role": "tool", "tool_call_id": "c1", "content": "3"},
            ],
            [
                message("user", "hi"),
                message("assistant", tool_calls=[call("c1", text)]),
                message("tool", "3", tool_call_id="c1"),
            ],
        )
        for arguments, text in (
            ("", "{}"),
            (None, "{}"),
            ('{"b": 1, "a": 2.0}', '{"b": 1, "a": 2.0}'),
            ({"b": 1, "a": [12345678901234567]}, '{"b":1,"a":[12345678901234567]}'),
            ({"b": "你"}, '{"b":"你"}'),
        )
    ),
    (
        [
            USER,
            assistant(of_chat("{}"), of_chat("{}"), content="both", reasoning_content="why"),
            USER,
        ],
        [
            message("user", "hi"),
            message(
                "assistant",
                "both",
                reasoning_content="why",
                tool_calls=[call("c1", ""), call("c1", "")],
            ),
            message("user", "hi"),
        ],
    ),
    (
        [USER, {"role": "assistant", "content": "a", "reasoning": "why"}],
        [message("user", "hi"), message("assistant", "a", reasoning_content="why")],
    ),
    (
        [USER, {"role": "tool", "content": [{"type": "text", "text": "4"}], "tool_call_id": "x"}],
        [message("user", "hi"), message("tool", "4", tool_call_id="x")],
    ),
]


@pytest.mark.parametrize(("messages", "expected"), CHATS)
async def test_a_chat_has_the_prompt_of_grpc(
    service: HttpService, messages: list[Json], expected: list[pb.ChatMessage]
) -> None:
    await check(service, "/v1/chat/completions", {"messages": messages}, chat(*expected))
    tokens = (await service.post("/tokenize", {"messages": messages}))["tokens"]
    tokenized = await service.stub.Tokenize(pb.TokenizeRequest(chat=chat(*expected)))
    assert tokens == list(tokenized.token_ids)


async def test_a_template_gets_its_variables_and_tools(service: HttpService) -> None:
    expected = chat(message("user", "hi"), chat_template_kwargs='{"enable_thinking":false}')
    kwargs = {"chat_template_kwargs": {"enable_thinking": False}}
    await check(service, "/v1/chat/completions", {"messages": [USER], **kwargs}, expected)
    await check(service, "/v1/messages", {"messages": [USER], **kwargs}, expected)
    await check(service, "/v1/responses", {"input": "hi", **kwargs}, expected)
    off = {"messages": [USER], "thinking": {"type": "disabled"}}
    await check(service, "/v1/messages", off, expected)
    effort: Json = {"messages": [USER], "reasoning_effort": "none"}
    await check(service, "/v1/chat/completions", effort, expected)
    effort = {"input": "hi", "reasoning": {"effort": "none"}}
    await check(service, "/v1/responses", effort, expected)

    expected = chat(message("user", "hi"), tools=[SHOWN])
    tools = [{"type": "function", "function": FUNCTION}]
    for choice in ({}, {"tool_choice": "auto"}, {"tool_choice": "none"}):
        body = {"messages": [USER], "tools": tools, **choice}
        await check(service, "/v1/chat/completions", body, expected)
    tools = [{"type": "function", **FUNCTION}]
    await check(service, "/v1/responses", {"input": "hi", "tools": tools}, expected)
    tools = [{"name": "f", "description": "adds", "input_schema": FUNCTION["parameters"]}]
    await check(service, "/v1/messages", {"messages": [USER], "tools": tools}, expected)


def tool_use(value: Json) -> Json:
    return {"type": "tool_use", "id": "c1", "name": "f", "input": value}


ANTHROPIC: list[tuple[Json, list[pb.ChatMessage]]] = [
    ({"messages": [USER], "system": "s"}, [message("system", "s"), message("user", "hi")]),
    (
        {
            "messages": [USER],
            "system": [{"type": "text", "text": "s"}, {"type": "text", "text": "t", "x": 1}],
        },
        [message("system", "s\nt"), message("user", "hi")],
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": t} for t in "ab"]}]},
        [message("user", "a\nb")],
    ),
    (
        {
            "messages": [
                USER,
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "why", "signature": "s"},
                        {"type": "redacted_thinking", "data": "x"},
                        {"type": "text", "text": "so"},
                        tool_use({"b": 1, "a": 2}),
                        tool_use({}),
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "c1", "content": "3"},
                        {
                            "type": "tool_result",
                            "tool_use_id": "c2",
                            "content": [
                                {"type": "text", "text": "4"},
                                {"type": "text", "text": "5"},
                            ],
                        },
                        {"type": "tool_result", "tool_use_id": "c3"},
                        {"type": "text", "text": "and?"},
                    ],
                },
            ]
        },
        [
            message("user", "hi"),
            message(
                "assistant",
                "so",
                reasoning_content="why",
                tool_calls=[call("c1", '{"b":1,"a":2}'), call("c1", "{}")],
            ),
            message("tool", "3", tool_call_id="c1"),
            message("tool", "4\n5", tool_call_id="c2"),
            message("tool", "", tool_call_id="c3"),
            message("user", "and?"),
        ],
    ),
]


@pytest.mark.parametrize(("body", "expected"), ANTHROPIC)
async def test_an_anthropic_chat_has_the_prompt_of_grpc(
    service: HttpService, body: Json, expected: list[pb.ChatMessage]
) -> None:
    await check(service, "/v1/messages", body, chat(*expected))
    tokenized = await service.stub.Tokenize(pb.TokenizeRequest(chat=chat(*expected)))
    counted = await service.post("/v1/messages/count_tokens", body)
    assert counted["input_tokens"] == len(tokenized.token_ids)


def of_user(*parts: Json) -> Json:
    return {"type": "message", "role": "user", "content": list(parts)}


def function_call(call_id: str) -> Json:
    return {"type": "function_call", "call_id": call_id, "name": "f", "arguments": '{"a": 1}'}


THOUGHT = {
    "type": "reasoning",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "why"}],
}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "3"}
RESPONSES: list[tuple[Json, list[pb.ChatMessage]]] = [
    ({"input": "hi"}, [message("user", "hi")]),
    (
        {"input": "hi", "instructions": "s"},
        [message("system", "s"), message("user", "hi")],
    ),
    (
        {"input": [{"role": "developer", "content": "s"}, USER]},
        [message("system", "s"), message("user", "hi")],
    ),
    (
        {
            "input": [
                of_user({"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"})
            ]
        },
        [message("user", "a\nb")],
    ),
    (
        {"input": [USER, THOUGHT, function_call("c1"), function_call("c2"), OUTPUT]},
        [
            message("user", "hi"),
            message(
                "assistant",
                reasoning_content="why",
                tool_calls=[call("c1", '{"a": 1}'), call("c2", '{"a": 1}')],
            ),
            message("tool", "3", tool_call_id="c1"),
        ],
    ),
    (
        {
            "input": [
                USER,
                THOUGHT,
                {"role": "assistant", "content": [{"type": "output_text", "text": "so"}]},
                function_call("c1"),
                OUTPUT | {"output": [{"type": "input_text", "text": "3"}]},
            ]
        },
        [
            message("user", "hi"),
            message(
                "assistant", "so", reasoning_content="why", tool_calls=[call("c1", '{"a": 1}')]
            ),
            message("tool", "3", tool_call_id="c1"),
        ],
    ),
]


@pytest.mark.parametrize(("body", "expected"), RESPONSES)
async def test_a_responses_input_has_the_prompt_of_grpc(
    service: HttpService, body: Json, expected: list[pb.ChatMessage]
) -> None:
    await check(service, "/v1/responses", body, chat(*expected))


async def test_an_output_of_a_response_can_be_the_next_input(service: HttpService) -> None:
    first = await service.post("/v1/responses", {"input": "hi", "max_output_tokens": 5})
    text = first["output"][0]["content"][0]["text"]
    assert service.scheduler.submits.get_nowait()
    body = {"input": [USER, *first["output"], USER]}
    expected = chat(message("user", "hi"), message("assistant", text), message("user", "hi"))
    await check(service, "/v1/responses", body, expected)


async def test_texts_are_tokenized_and_back(service: HttpService) -> None:
    tokens = await service.post("/v1/tokenize", {"prompt": "hi é", "return_token_strs": True})
    expected = await service.stub.Tokenize(pb.TokenizeRequest(text="hi é"))
    assert tokens["tokens"] == list(expected.token_ids)
    assert tokens["count"] == len(expected.token_ids) == len(tokens["token_strs"])
    assert tokens["max_model_len"] == 1000
    back = await service.post("/v1/detokenize", {"tokens": tokens["tokens"], "model": "demo"})
    assert back == {"prompt": "hi é"}
    for body in ({}, {"prompt": "a", "messages": [USER]}):
        assert (await service.error("/tokenize", body))[0] == 400
    status, error = await service.error("/detokenize", {"tokens": [1, 1536]})
    assert (status, error["error"]["param"]) == (400, "tokens[1]")
