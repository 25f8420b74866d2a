"""Reads a chat into the form that chat templates take. Error messages never quote the chat."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from frontend.text.json_text import parse_json
from nano_vllm_grpc.pb import frontend_pb2 as pb
from shared.errors import InvalidArgumentError

# Of one JSON text. Parsing this many bytes holds the interpreter's lock for 2 ms.
MAX_JSON_BYTES = 64 << 10
# Of a chat's tools and arguments together, which templates may write with indentation.
MAX_CHAT_JSON_BYTES = 512 << 10
# Fewer bytes, because a template may repeat the arguments for each message.
MAX_KWARGS_BYTES = 4 << 10
MAX_JSON_DEPTH = 32
_SHORT_ID = 9  # characters


@dataclass(frozen=True, slots=True)
class Conversation:
    """A chat in the shape that `apply_chat_template` of transformers takes."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    template_kwargs: dict[str, Any]
    continue_final_message: bool


def read_conversation(chat: pb.Chat) -> Conversation:
    """Reads a chat, and checks everything in it that does not depend on the template.

    Raises:
        InvalidArgumentError: there are no messages, a JSON text is malformed or too large, or
            fields contradict each other.
    """
    if not chat.messages:
        raise InvalidArgumentError("chat.messages", "empty; must have at least one message")
    _check_size(chat)
    tools = [_tool(f"chat.tools[{index}]", text) for index, text in enumerate(chat.tools)]
    messages = [
        _message(f"chat.messages[{index}]", message) for index, message in enumerate(chat.messages)
    ]
    if chat.continue_final_message:
        _check_final(messages[-1])
    field = "chat.chat_template_kwargs"
    kwargs = _json_object(field, chat.chat_template_kwargs or "{}", MAX_KWARGS_BYTES)
    return Conversation(messages, tools or None, kwargs, chat.continue_final_message)


def with_short_ids(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with ids of tool calls of 9 letters and digits, which Mistral's templates ask
    for. Equal ids stay equal."""

    def short(each: dict[str, Any], key: str) -> dict[str, Any]:
        text = each.get(key, "")
        if not text or (len(text) == _SHORT_ID and text.isascii() and text.isalnum()):
            return each
        return {**each, key: hashlib.sha256(text.encode()).hexdigest()[:_SHORT_ID]}

    found = []
    for message in messages:
        message = short(message, "tool_call_id")
        if calls := message.get("tool_calls"):
            message = {**message, "tool_calls": [short(call, "id") for call in calls]}
        found.append(message)
    return found


def with_tools_in_text(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None
) -> list[dict[str, Any]]:
    """The messages with the tools as a text in the first one, the system's, and with calls in the
    contents, as Phi-4-mini was trained."""
    found = []
    for message in messages:
        if calls := message.get("tool_calls"):
            text = _json([call["function"] for call in calls])
            content = f"{message['content']}<|tool_call|>{text}<|/tool_call|>"
            message = {"role": message["role"], "content": content}
        found.append(message)
    if tools:
        if found[0]["role"] != "system":
            found.insert(0, {"role": "system", "content": ""})
        found[0] = {**found[0], "tools": _json([tool["function"] for tool in tools])}
    return found


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _check_size(chat: pb.Chat) -> None:
    size = sum(len(tool) for tool in chat.tools)
    for message in chat.messages:
        size += sum(len(call.function.arguments) for call in message.tool_calls)
    if size > MAX_CHAT_JSON_BYTES:
        raise InvalidArgumentError(
            "chat",
            f"{size} characters of tools and arguments; the limit is {MAX_CHAT_JSON_BYTES}",
        )


def _tool(field: str, text: str) -> dict[str, Any]:
    tool = _json_object(field, text)
    if tool.get("type") != "function":
        raise InvalidArgumentError(f"{field}.type", 'must be "function"')
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name:
        raise InvalidArgumentError(f"{field}.function.name", "missing; must be a string")
    return tool


def _message(field: str, message: pb.ChatMessage) -> dict[str, Any]:
    """A message without its unset keys, because templates test whether a key is defined."""
    found: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.name:
        found["name"] = message.name
    if message.tool_call_id:
        _check_role(field, message, "tool_call_id", "tool")
        found["tool_call_id"] = message.tool_call_id
    if message.HasField("reasoning_content"):
        _check_role(field, message, "reasoning_content", "assistant")
        found["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        _check_role(field, message, "tool_calls", "assistant")
        found["tool_calls"] = [
            _tool_call(f"{field}.tool_calls[{index}]", call)
            for index, call in enumerate(message.tool_calls)
        ]
    return found


def _check_role(field: str, message: pb.ChatMessage, name: str, role: str) -> None:
    if message.role != role:
        raise InvalidArgumentError(f"{field}.{name}", f"requires a message with role {role}")


def _tool_call(field: str, call: pb.ToolCall) -> dict[str, Any]:
    if not call.function.name:
        raise InvalidArgumentError(f"{field}.function.name", "empty; must be the tool's name")
    # An object, as transformers documents. Many templates would write a text as a JSON string.
    arguments = _json_object(f"{field}.function.arguments", call.function.arguments or "{}")
    found = {"type": "function", "function": {"name": call.function.name, "arguments": arguments}}
    return {"id": call.id, **found} if call.id else found


def _check_final(message: dict[str, Any]) -> None:
    field = "chat.continue_final_message"
    if not message["content"]:
        raise InvalidArgumentError(field, "the last message has no content to continue")
    if "tool_calls" in message:
        raise InvalidArgumentError(field, "the last message has tool calls after its content")


def _json_object(field: str, text: str, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    size = len(text.encode())
    if size > max_bytes:
        raise InvalidArgumentError(field, f"{size} bytes; the limit is {max_bytes}")
    value = parse_json(field, text)
    if not isinstance(value, dict):
        raise InvalidArgumentError(field, "not a JSON object")
    _check_value(field, value, MAX_JSON_DEPTH)
    return value


def _check_value(field: str, value: Any, levels: int) -> None:
    """Rejects a value that nests deeper than `levels`, and half of a surrogate pair. JSON can hold
    half of a pair, but no tokenizer can read it."""
    if isinstance(value, str) and not value.isprintable():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise InvalidArgumentError(field, "contains half of a surrogate pair") from error
    elif isinstance(value, dict | list):
        if not levels:
            raise InvalidArgumentError(field, f"nests deeper than {MAX_JSON_DEPTH} levels")
        for each in (*value, *value.values()) if isinstance(value, dict) else value:
            _check_value(field, each, levels - 1)
