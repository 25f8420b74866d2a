"""Reads chats with tools as OpenAI's APIs have them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from frontend.http.errors import ParameterError
from frontend.http.formats.tool_format import ToolFormat, forced_calls, tool_format
from frontend.http.parameters import Body, Items, Object, set_constraint
from nano_vllm_grpc.pb import frontend_pb2 as pb


class Part(Body):
    """A part of a message's content, of which only texts are served."""

    type: str
    text: str | None = None
    refusal: str | None = None


Content = str | Items[Part] | None


class Function(Body):
    name: str
    arguments: str | Object | None = None


class ToolCall(Body):
    id: str | None = None
    function: Function


class Message(Body):
    role: str
    content: Content = None
    name: str | None = None
    tool_calls: Items[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class Item(Body):
    """An item of the input: a message, a call, its output or a thought."""

    type: str = "message"
    id: str | None = None
    role: str | None = None
    content: Content = None
    summary: Items[Part] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: Content = None


class Tool(Body):
    type: Literal["function"]
    function: Object


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedTool


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools that a chat offers, and whether an answer has to call one.

    `forced`: the functions of which one has to be called; empty: none has to.
    """

    definitions: Sequence[dict[str, Any]] = ()  # as OpenAI's `function`
    parsed: bool = False
    forced: Sequence[dict[str, Any]] = ()
    parallel: bool = True

    def format(self, template: str) -> ToolFormat | None:
        """The format in which answers call tools; None if they are not to be read."""
        return tool_format(template) if self.parsed else None


def read_tools(
    tools: Sequence[dict[str, Any]], choice: str | None, name: str, *, parallel: bool
) -> Tools:
    """
    Args:
        tools: OpenAI's `function` of each.
        choice: none, auto or required; None: auto.
        name: of the function that must be called; empty if none was named.

    Raises:
        ParameterError: the choice and the tools contradict each other.
    """
    for index, tool in enumerate(tools):
        if not isinstance(tool.get("name"), str) or not tool["name"]:
            raise ParameterError(f"tools[{index}].function.name", "must be a text")
        if not isinstance(tool.get("parameters"), dict | None):
            raise ParameterError(f"tools[{index}].function.parameters", "must be an object")
    if not tools:
        if name or choice == "required":
            raise ParameterError("tool_choice", "requires tools")
        return Tools()
    forced: Sequence[dict[str, Any]] = ()
    if name:
        forced = [tool for tool in tools if tool["name"] == name]
        if not forced:
            raise ParameterError("tool_choice", "names a function that is not in tools")
    elif choice == "required":
        forced = tools
    return Tools(tools, choice != "none", forced, parallel and not name)


class ChatFields(Body):
    """The parameters of a chat completion that make its prompt, besides the messages."""

    tools: Items[Tool] | None = None
    chat_template_kwargs: Object | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


def chat_with_fields(
    fields: ChatFields, messages: Sequence[Message], tools: Tools, template: str, kwargs: Object
) -> pb.Chat:
    """A chat for the model's template, in the form of OpenAI's chat completions.

    Raises:
        ParameterError: a part of a message is not a text, or the fields contradict each other.
    """
    continues = bool(fields.continue_final_message)
    if fields.add_generation_prompt is continues:
        raise ParameterError(
            "add_generation_prompt", "must be the opposite of continue_final_message"
        )
    read = [_message(f"messages[{index}]", message) for index, message in enumerate(messages)]
    kwargs = {**(fields.chat_template_kwargs or {}), **kwargs}
    return chat_of(read, tools, template, kwargs, continues=continues)


def chat_of(
    messages: Sequence[pb.ChatMessage],
    tools: Tools,
    template: str,
    kwargs: Object | None = None,
    *,
    continues: bool = False,
) -> pb.Chat:
    """A chat for the model's template.

    Args:
        kwargs: variables of the template.
        continues: whether the answer continues the last message.
    """
    # A call can be forced even if the template does not show tools.
    shown = tools.definitions if "tools" in template or not tools.forced else ()
    if "reasoning_content" not in template:
        for message in messages:
            message.ClearField("reasoning_content")
    if "developer" not in template:
        for message in messages:
            message.role = "system" if message.role == "developer" else message.role
    return pb.Chat(
        messages=messages,
        tools=[orjson.dumps({"type": "function", "function": tool}).decode() for tool in shown],
        chat_template_kwargs=orjson.dumps(kwargs).decode() if kwargs else "",
        continue_final_message=continues,
    )


def force_calls(sampling: pb.SamplingParams, tools: Tools, template: str) -> None:
    """Has a grammar force a call, if one has to be made.

    Raises:
        ParameterError: there is another grammar.
    """
    if not tools.forced:
        return
    if sampling.HasField("structured_output"):
        raise ParameterError(
            "tool_choice", "forces a call, which cannot be used with another constraint"
        )
    functions = [(tool["name"], tool.get("parameters")) for tool in tools.forced]
    tag = forced_calls(tool_format(template), functions, parallel=tools.parallel)
    set_constraint(sampling, "structural_tag", tag)


def _message(field: str, message: Message) -> pb.ChatMessage:
    found = pb.ChatMessage(
        role=message.role,
        content=text_of(f"{field}.content", message.content),
        name=message.name or "",
        tool_call_id=message.tool_call_id or "",
        tool_calls=[tool_call(call.id, call.function) for call in message.tool_calls or ()],
    )
    reasoning = message.reasoning_content or message.reasoning
    if reasoning:
        found.reasoning_content = reasoning
    return found


def item_messages(instructions: str | None, items: str | Sequence[Item]) -> list[pb.ChatMessage]:
    """Reads the input of a response. Thoughts and calls join the assistant's message beside them.

    Raises:
        ParameterError: an item is of a kind that is not served.
    """
    messages = [pb.ChatMessage(role="system", content=instructions)] if instructions else []
    if isinstance(items, str):
        return [*messages, pb.ChatMessage(role="user", content=items)]
    reasoning = ""
    for index, item in enumerate(items):
        field = f"input[{index}]"
        if item.type == "reasoning":
            reasoning = text_of(f"{field}.content", item.content)
            continue
        if item.type == "function_call":
            call = tool_call(item.call_id, Function(name=item.name or "", arguments=item.arguments))
            if not (messages and messages[-1].role == "assistant") or reasoning:
                messages.append(pb.ChatMessage(role="assistant"))
            messages[-1].tool_calls.append(call)
        elif item.type == "function_call_output":
            output = text_of(f"{field}.output", item.output)
            messages.append(
                pb.ChatMessage(role="tool", content=output, tool_call_id=item.call_id or "")
            )
        elif item.type == "message" and item.role:
            content = text_of(f"{field}.content", item.content)
            messages.append(pb.ChatMessage(role=item.role, content=content))
        else:
            raise ParameterError(f"{field}.type", "not served; must be a message or a call")
        if reasoning and messages[-1].role == "assistant":
            messages[-1].reasoning_content = reasoning
        reasoning = ""
    return messages


def tool_call(call_id: str | None, function: Function) -> pb.ToolCall:
    """An earlier call. Arguments of an empty text are `{}`."""
    arguments = function.arguments or ""
    text = arguments if isinstance(arguments, str) else orjson.dumps(arguments).decode()
    return pb.ToolCall(
        id=call_id or "", function=pb.FunctionCall(name=function.name, arguments=text)
    )


_TEXTS = ("text", "input_text", "output_text", "reasoning_text")


def text_of(field: str, content: Content) -> str:
    """Joins the texts of a message's parts with newlines, as vLLM does.

    Raises:
        ParameterError: a part is not a text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    for index, part in enumerate(content):
        if part.type == "refusal" or (part.type in _TEXTS and part.text is not None):
            continue
        raise ParameterError(
            f"{field}[{index}]", "not a part with a text; this model takes only texts"
        )
    return "\n".join(part.text or part.refusal or "" for part in content)
