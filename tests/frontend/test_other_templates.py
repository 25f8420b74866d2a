"""Tools in chat templates that do not take them as others do: Mistral's and Phi-4-mini's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nano_vllm_grpc.pb import frontend_pb2 as pb
from shared.errors import InvalidArgumentError
from tests.frontend.test_pairs import tokenizer_with

# The conditions of Mistral's own, as of version 3 of its tokenizer.
MISTRAL = """{%- for m in messages %}
{%- if m.tool_calls is defined and m.tool_calls is not none %}[TOOL_CALLS] [
{%- for call in m.tool_calls %}{%- if not call.id is defined or call.id|length != 9 %}
{{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
{%- endif %}{{- call.function|tojson }} {{ call.id }}{%- endfor %}]
{%- elif m.role == "tool" %}
{%- if not m.tool_call_id is defined or m.tool_call_id|length != 9 %}
{{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
{%- endif %}[TOOL_RESULTS]{{ m.content }} {{ m.tool_call_id }}
{%- else %}[{{ m.role }}]{{ m.content }}
{%- endif %}
{%- endfor %}{%- if tools %}{{ tools|length }}{%- endif %}"""
# Microsoft's.
PHI = (
    "{% for message in messages %}{% if message['role'] == 'system' and 'tools' in message and "
    "message['tools'] is not none %}{{ '<|' + message['role'] + '|>' + message['content'] + "
    "'<|tool|>' + message['tools'] + '<|/tool|>' + '<|end|>' }}{% else %}{{ '<|' + "
    "message['role'] + '|>' + message['content'] + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}"
)
ADD = {"name": "add", "parameters": {"type": "object", "description": "é"}}


def chat(system: str | None, tool_ids: tuple[str, str]) -> pb.Chat:
    call = pb.ToolCall(id=tool_ids[0], function=pb.FunctionCall(name="add", arguments='{"a": "é"}'))
    messages = [pb.ChatMessage(role="system", content=system)] if system is not None else []
    messages += [
        pb.ChatMessage(role="user", content="Add."),
        pb.ChatMessage(role="assistant", content="Well.", tool_calls=[call]),
        pb.ChatMessage(role="tool", content="3", tool_call_id=tool_ids[1]),
    ]
    return pb.Chat(messages=messages, tools=[json.dumps({"type": "function", "function": ADD})])


@pytest.mark.parametrize("given", ["call_0123456789abcdef", "abcdef123", "a"])
async def test_ids_have_the_length_that_mistral_asks_for(tmp_path: Path, given: str) -> None:
    own = tokenizer_with(tmp_path, MISTRAL)
    ids = await own.encode_chat(chat(None, (given, given)))
    (parts,) = [await own.decode(ids)]
    made = parts.split("[TOOL_RESULTS]3 ")[1][:9]
    assert f"}} {made}]" in parts  # that of the call
    assert made.isalnum()
    assert made == "abcdef123" or given != "abcdef123"
    with pytest.raises(InvalidArgumentError, match="Tool call IDs should be"):
        await own.encode_chat(chat(None, ("", "a")))
    own.close()


@pytest.mark.parametrize("system", [None, "Be brief."])
async def test_phis_tools_are_a_text_in_the_system_message(
    tmp_path: Path, system: str | None
) -> None:
    own = tokenizer_with(tmp_path, PHI)
    ids = await own.encode_chat(chat(system, ("a", "a")))
    calls: list[dict[str, Any]] = [{"name": "add", "arguments": {"a": "é"}}]
    expected = (
        f"<|system|>{system or ''}<|tool|>{json.dumps([ADD], ensure_ascii=False)}<|/tool|><|end|>"
        f"<|user|>Add.<|end|><|assistant|>Well."
        f"<|tool_call|>{json.dumps(calls, ensure_ascii=False)}<|/tool_call|><|end|>"
        "<|tool|>3<|end|><|assistant|>"
    )
    (right,) = await own.encode_words([expected])
    assert ids == right
    own.close()
