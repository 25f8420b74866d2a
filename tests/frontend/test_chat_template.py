"""Chats as Qwen3's own template renders them, checked against transformers, and bad chats."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from frontend.settings import FrontendSettings
from frontend.text.tokenizer import Tokenizer
from nano_vllm_grpc import AsyncLLM, Chat, SamplingParams
from nano_vllm_grpc.pb import frontend_pb2 as pb
from shared.errors import InvalidArgumentError
from tests.frontend.conftest import DEMO, QWEN3_TEMPLATE, Service, link_with_qwen3_template
from tests.frontend.test_generation import accept_long_sequences

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather <now> & here, in °C",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer", "default": 3}},
            "required": ["city"],
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock", "strict": True, "parameters": {}}}
QUESTION = {"role": "user", "content": "How warm is it in Paris?"}
CALLS = {
    "role": "assistant",
    "content": "",
    "reasoning_content": "I need two tools.",
    "tool_calls": [
        {
            "id": "call_1",
            "type": "function",
            "function": {
                "name": "get_weather",
                "arguments": {"days": 1, "city": "Paris ❄", "x": 0.5},
            },
        },
        {"id": "call_2", "type": "function", "function": {"name": "clock", "arguments": {}}},
    ],
}
RESULTS = [
    {"role": "tool", "tool_call_id": "call_1", "name": "get_weather", "content": '{"warm": 21}'},
    {"role": "tool", "tool_call_id": "call_2", "content": "noon"},
]
ANSWER = {"role": "assistant", "content": "21 °C.", "reasoning_content": "\nEasy.\n"}
CHATS = {
    "a question": Chat([QUESTION]),
    "tools": Chat([QUESTION], [WEATHER, CLOCK]),
    "tools after a system message": Chat([{"role": "system", "content": "Hi."}, QUESTION], [CLOCK]),
    "results": Chat([QUESTION, CALLS, *RESULTS], [WEATHER, CLOCK]),
    "thinking": Chat([QUESTION], chat_template_kwargs={"enable_thinking": True}),
    "no thinking": Chat([QUESTION], chat_template_kwargs={"enable_thinking": False}),
    "turns with reasoning": Chat([QUESTION, CALLS, *RESULTS, ANSWER, QUESTION], [CLOCK]),
    "reasoning within the content": Chat(
        [QUESTION, {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nYes."}, QUESTION]
    ),
    "no reasoning at all": Chat([QUESTION, CALLS, *RESULTS, {**ANSWER, "reasoning_content": ""}]),
    "a continued answer": Chat([QUESTION, {**ANSWER}], continue_final_message=True),
    "a continued answer with tools": Chat(
        [QUESTION, CALLS, *RESULTS, {"role": "assistant", "content": "It is "}],
        [WEATHER],
        continue_final_message=True,
    ),
    "a continued question": Chat([QUESTION], continue_final_message=True),
}


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model's tokenizer with Qwen3's template."""
    directory = tmp_path_factory.mktemp("qwen3")
    link_with_qwen3_template(directory)
    return directory


@pytest.fixture(scope="module")
def tokenizer(qwen3: Path) -> Iterator[Tokenizer]:
    tokenizer = Tokenizer(qwen3, threads=1)
    yield tokenizer
    tokenizer.close()


@pytest.fixture
def settings(settings: FrontendSettings, qwen3: Path) -> FrontendSettings:
    return settings.model_copy(update={"model": str(qwen3)})


@pytest.fixture
async def llm(service: Service) -> AsyncIterator[AsyncLLM]:
    async with AsyncLLM(service.address) as llm:
        yield llm


async def test_prompts_are_those_of_transformers(llm: AsyncLLM, qwen3: Path) -> None:
    hf = AutoTokenizer.from_pretrained(str(qwen3))
    assert hf.chat_template == QWEN3_TEMPLATE.read_text()
    seen = set()
    for name, chat in CHATS.items():
        expected = hf.apply_chat_template(
            chat.messages,
            tools=chat.tools or None,
            continue_final_message=chat.continue_final_message,
            add_generation_prompt=not chat.continue_final_message,
            return_dict=False,
            **chat.chat_template_kwargs,
        )
        assert await llm.tokenize(chat) == expected, name
        seen.add(tuple(expected))
    assert len(seen) == len(CHATS) - 1  # thinking is the default


async def test_generation_uses_the_rendered_prompt(llm: AsyncLLM, service: Service) -> None:
    """The fake scheduler repeats the prompt."""
    await accept_long_sequences(service)
    none = Chat([QUESTION], [WEATHER], {"enable_thinking": False})
    for chat in (none, CHATS["a continued answer"]):
        prompt = await llm.tokenize(chat)
        (completion,) = await llm.chat(
            chat.messages,
            SamplingParams(max_tokens=len(prompt), ignore_eos=True),
            use_tqdm=False,
            tools=chat.tools,
            chat_template_kwargs=chat.chat_template_kwargs,
            continue_final_message=chat.continue_final_message,
        )
        assert completion["token_ids"] == prompt


async def test_arguments_may_be_json_text(llm: AsyncLLM) -> None:
    text = json.dumps(CALLS["tool_calls"][0]["function"]["arguments"], indent=2)  # type: ignore[index]
    first = {"id": "call_1", "function": {"name": "get_weather", "arguments": text}}
    none = {"id": "call_2", "function": {"name": "clock", "arguments": ""}}
    calls = {**CALLS, "tool_calls": [first, none]}
    chat = CHATS["results"]
    same = replace(chat, messages=[QUESTION, calls, *RESULTS])
    assert await llm.tokenize(same) == await llm.tokenize(chat)


def message(role: str = "assistant", content: str = "a", **fields: Any) -> pb.ChatMessage:
    return pb.ChatMessage(role=role, content=content, **fields)


def call(arguments: str, name: str = "clock") -> pb.ToolCall:
    return pb.ToolCall(function=pb.FunctionCall(name=name, arguments=arguments))


def tool(**fields: object) -> str:
    return json.dumps({"type": "function", "function": {"name": "a", **fields}})


async def rejection(tokenizer: Tokenizer, **fields: Any) -> str:
    chat = pb.Chat(**{"messages": [message(role="user")], **fields})
    with pytest.raises(InvalidArgumentError) as rejected:
        await tokenizer.encode_chat(chat)
    return str(rejected.value)


ARGUMENTS = "chat.messages[0].tool_calls[0].function.arguments"
KWARGS = "chat.chat_template_kwargs"
CONTINUE = "chat.continue_final_message"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"messages": []}, "chat.messages: empty"),
        ({"messages": [message(role="human")]}, "chat.messages[0].role: unknown; must be one of"),
        # Qwen3's template has no developer: it would leave the message out.
        ({"messages": [message(role="developer")]}, "chat.messages[0].role: unknown; must be one"),
        ({"messages": [message(tool_calls=[call("[]")])]}, f"{ARGUMENTS}: not a JSON object"),
        ({"messages": [message(tool_calls=[call("{'a': 1}")])]}, f"{ARGUMENTS}: not JSON: Expect"),
        ({"messages": [message(tool_calls=[call('{"a": NaN}')])]}, f"{ARGUMENTS}: not JSON: NaN"),
        (
            {"messages": [message(tool_calls=[call('{"\\ud800": 1}')])]},
            f"{ARGUMENTS}: contains half of a",
        ),
        (
            {"messages": [message(tool_calls=[call('{"a":' + "[" * 32 + "]" * 32 + "}")])]},
            f"{ARGUMENTS}: nests deeper than 32 levels",
        ),
        ({"messages": [message(tool_calls=[call("[" * 60_000)])]}, f"{ARGUMENTS}: not readable"),
        (
            {"messages": [message(tool_calls=[call(" " * 65_537)])]},
            f"{ARGUMENTS}: 65537 bytes; the limit is 65536",
        ),
        (
            {"messages": [message(tool_calls=[call("{}", name="")])]},
            "chat.messages[0].tool_calls[0].function.name: empty",
        ),
        (
            {"messages": [message(role="user", tool_calls=[call("{}")])]},
            "chat.messages[0].tool_calls: requires a message with role assistant",
        ),
        (
            {"messages": [message(role="user", reasoning_content="")]},
            "chat.messages[0].reasoning_content: requires a message with role assistant",
        ),
        (
            {"messages": [message(tool_call_id="call_1")]},
            "chat.messages[0].tool_call_id: requires a message with role tool",
        ),
        ({"tools": ["{}"]}, 'chat.tools[0].type: must be "function"'),
        ({"tools": [tool(), tool(name="")]}, "chat.tools[1].function.name: missing"),
        (
            {"tools": [tool(description="é" * 30_000)] * 20},
            "chat: 3601320 characters of tools and arguments; the limit is 524288",
        ),
        ({"chat_template_kwargs": "[]"}, f"{KWARGS}: not a JSON object"),
        ({"chat_template_kwargs": " " * 4097}, f"{KWARGS}: 4097 bytes; the limit is 4096"),
        (
            {"continue_final_message": True, "messages": [message(content="")]},
            f"{CONTINUE}: the last message has no content",
        ),
        (
            {"continue_final_message": True, "messages": [message(tool_calls=[call("{}")])]},
            f"{CONTINUE}: the last message has tool calls",
        ),
        (
            {
                "continue_final_message": True,
                "messages": [message(role="user"), message(content="<think>b</think>c")],
            },
            f"{CONTINUE}: the model's chat template changes the content of",
        ),
    ],
)
async def test_bad_chats_are_rejected_by_field(
    fields: dict[str, Any], reason: str, tokenizer: Tokenizer
) -> None:
    assert (await rejection(tokenizer, **fields)).startswith(reason)


# What apply_chat_template and the template's environment would read, or be confused by.
@pytest.mark.parametrize(
    "name",
    [
        *("messages", "tools", "conversation", "conversations", "self", "documents"),
        *("add_generation_prompt", "continue_final_message", "chat_template", "tokenize"),
        *("eos_token", "namespace", "raise_exception", "enable_thinkin", "__class__"),
    ],
)
async def test_kwargs_reach_only_the_templates_own_variables(
    name: str, tokenizer: Tokenizer
) -> None:
    reason = await rejection(tokenizer, chat_template_kwargs=json.dumps({name: "{{ messages }}"}))
    assert reason.startswith(f"{KWARGS}: unknown")
    assert " enable_thinking" in reason


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"tools": [tool()]}, "chat.tools: unknown to the chat template"),
        (
            {"messages": [message(tool_calls=[call("{}")])]},
            "chat.messages[0].tool_calls: unknown to the chat template",
        ),
        (
            {"messages": [message(reasoning_content="a")]},
            "chat.messages[0].reasoning_content: unknown to the chat template",
        ),
        (
            {"messages": [message(role="tool")]},
            "chat.messages[0].role: unknown; must be one of system, user, assistant",
        ),
        (
            {"chat_template_kwargs": '{"enable_thinking": false}'},
            f"{KWARGS}: unknown name; the model's chat template reads none",
        ),
    ],
)
async def test_parts_that_a_template_ignores_are_rejected(
    fields: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    tokenizer = tokenizer_with(
        "{% for m in messages %}{% if m.role not in ['system', 'user', 'assistant'] %}"
        "{{ raise_exception(m.role) }}{% endif %}{{ m.content }}{% endfor %}",
        tmp_path,
    )
    assert await rejection(tokenizer, **fields) == reason
    tokenizer.close()


def tokenizer_with(template: str, directory: Path) -> Tokenizer:
    """The demo model's, with another chat template."""
    values = json.loads((DEMO / "tokenizer_config.json").read_text())
    for path in DEMO.glob("*.json"):
        (directory / path.name).write_bytes(path.read_bytes())
    (directory / "tokenizer_config.json").write_text(
        json.dumps({**values, "chat_template": template})
    )
    return Tokenizer(directory, threads=1)


async def test_a_role_that_a_template_renders_without_naming_it_is_accepted(tmp_path: Path) -> None:
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    tokenizer = tokenizer_with(template, tmp_path)
    chat = pb.Chat(messages=[message(role="developer", content="Be brief."), message(role="tool")])
    expected = await tokenizer.encode_text("[developer] Be brief.\n[tool] a\n")
    assert await tokenizer.encode_chat(chat) == expected
    tokenizer.close()
