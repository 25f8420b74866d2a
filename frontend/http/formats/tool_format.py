"""Formats of tool calls: their choice by a chat template, and the grammar that forces calls."""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import Enum
from typing import Any

# What encloses DeepSeek's calls.
CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, NAME_END, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
PYTHON_TAG = "<|python_tag|>"
# What is around Phi-4's calls, and in Mistral's.
PHI_BEGIN, PHI_END = "<|tool_call|>", "<|/tool_call|>"
MISTRAL_CALLS, MISTRAL_ID, MISTRAL_ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


class ToolFormat(Enum):
    """How a model writes tool calls."""

    HERMES = "Hermes"
    LLAMA = "Llama"
    DEEPSEEK = "DeepSeek"
    MISTRAL = "Mistral, a list"
    MISTRAL_11 = "Mistral, since tokenizer 11"
    PHI = "Phi-4"


# The texts with which calls begin, which may be special tokens.
CALL_MARKS = {
    ToolFormat.HERMES: "<tool_call>",
    ToolFormat.LLAMA: PYTHON_TAG,
    ToolFormat.DEEPSEEK: CALLS_BEGIN,
    ToolFormat.MISTRAL: MISTRAL_CALLS,
    ToolFormat.MISTRAL_11: MISTRAL_CALLS,
    ToolFormat.PHI: PHI_BEGIN,
}
_SEPARATORS = {
    ToolFormat.LLAMA: "; ",
    ToolFormat.MISTRAL: ", ",
    ToolFormat.MISTRAL_11: "",
    ToolFormat.PHI: ", ",
}
_AROUND_CALLS = {
    ToolFormat.DEEPSEEK: (CALLS_BEGIN, CALLS_END),
    ToolFormat.MISTRAL: (f"{MISTRAL_CALLS}[", "]"),
    ToolFormat.PHI: (f"{PHI_BEGIN}[", f"]{PHI_END}"),
}
# The first of these that a chat template contains decides.
TEMPLATE_MARKS = {
    CALLS_BEGIN: ToolFormat.DEEPSEEK,
    "<tool_call>": ToolFormat.HERMES,
    PYTHON_TAG: ToolFormat.LLAMA,
    MISTRAL_ARGUMENTS: ToolFormat.MISTRAL_11,
    MISTRAL_CALLS: ToolFormat.MISTRAL,
    "<|tool|>": ToolFormat.PHI,
    "<|im_start|>": ToolFormat.HERMES,  # the custom of models that are trained with these marks
}


def tool_format(template: str) -> ToolFormat:
    """The format of tool calls of a model with this chat template.

    Without a mark, it is Hermes, because forced calls need a format."""
    found = (form for mark, form in TEMPLATE_MARKS.items() if mark in template)
    return next(found, ToolFormat.HERMES)


def reasons(template: str) -> bool:
    """Whether a model with this chat template may begin its answers with reasoning."""
    return "<think>" in template or "</think>" in template


def forced_calls(
    form: ToolFormat, functions: Sequence[tuple[str, dict[str, Any] | None]], *, parallel: bool
) -> dict[str, Any]:
    """A structural tag whose texts are calls that `AnswerParser` reads.

    Args:
        functions: the names of those that may be called, with the schemas of their arguments.
        parallel: whether there may be more than one call.
    """
    tags = []
    for name, schema in functions:
        begin, end = _around_arguments(form, name)
        content = {"type": "json_schema", "json_schema": _of_object(schema or {})}
        tags.append({"type": "tag", "begin": begin, "content": content, "end": end})
    calls = {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": _SEPARATORS.get(form, "\n"),
        "at_least_one": True,
        "stop_after_first": not parallel,
    }
    if form in _AROUND_CALLS:
        begin, end = _AROUND_CALLS[form]
        calls = {"type": "tag", "begin": begin, "content": calls, "end": end}
    return {"type": "structural_tag", "format": calls}


def _of_object(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema that allows nothing but objects, unless it refers to others."""
    refers = schema.keys() & {"$ref", "allOf", "anyOf", "oneOf"}
    return schema if refers else {"type": "object", **schema}


def _around_arguments(form: ToolFormat, name: str) -> tuple[str, str]:
    """The text before the arguments of a call, and the text after them."""
    match form:
        case ToolFormat.HERMES:
            begin = f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": '
            return begin, "}\n</tool_call>"
        case ToolFormat.LLAMA:
            return f'{{"name": {json.dumps(name)}, "parameters": ', "}"
        case ToolFormat.MISTRAL | ToolFormat.PHI:
            return f'{{"name": {json.dumps(name)}, "arguments": ', "}"
        case ToolFormat.MISTRAL_11:
            return f"{MISTRAL_CALLS}{name}{MISTRAL_ARGUMENTS}", ""
        case ToolFormat.DEEPSEEK:
            begin = f"{CALL_BEGIN}function{NAME_END}{name}\n```json\n"
            return begin, f"\n```{CALL_END}"
