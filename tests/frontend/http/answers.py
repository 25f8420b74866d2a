"""Parses answers, and has calls as models write them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Literal

from frontend.http.formats.parser import (
    AnswerParser,
    CallArguments,
    CallBegin,
    Content,
    Event,
)
from frontend.http.formats.tool_format import ToolFormat

Begins = Literal["none", "may_begin", "begun"]
BEGINS: tuple[Begins, ...] = ("none", "may_begin", "begun")
HERMES, LLAMA, DEEPSEEK = ToolFormat.HERMES, ToolFormat.LLAMA, ToolFormat.DEEPSEEK
MISTRAL, MISTRAL_11, PHI = ToolFormat.MISTRAL, ToolFormat.MISTRAL_11, ToolFormat.PHI
TOOLS = (None, *ToolFormat)

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
ADD = [CallBegin("add"), CallArguments('{"a": 1}')]
TAG = "<|python_tag|>"
LLAMA_CALL = '{"name": "add", "parameters": {"a": 1}}'
CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
ONE, SEP, ONE_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
LISTED = '{"name": "add", "arguments": {"a": 1}}'
MISTRAL_CALLS = "[TOOL_CALLS]"
MISTRAL_CALL = '[TOOL_CALLS]add[ARGS]{"a": 1}'
PHI_BEGIN, PHI_END = "<|tool_call|>", "<|/tool_call|>"
V3_CALL = f'{ONE}function{SEP}add\n```json\n{{"a": 1}}\n```{ONE_END}'
V31_CALL = f'{ONE}add{SEP}{{"a": 1}}{ONE_END}'


def parse(pieces: Iterable[str], reasoning: Begins, tools: ToolFormat | None) -> list[Event]:
    """The events of an answer, neighbors of one kind joined."""
    parser = AnswerParser(reasoning=reasoning, tools=tools)
    events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
    joined: list[Event] = []
    for kind, group in itertools.groupby(events, type):
        if kind is CallBegin:
            joined += group
        else:
            joined.append(kind("".join(event.text for event in group)))  # type: ignore[union-attr]
    return joined


def whole(text: str, tools: ToolFormat | None, reasoning: Begins = "none") -> list[Event]:
    events = parse([text], reasoning, tools)
    assert parse(text, reasoning, tools) == events
    return events


def content(text: str) -> list[Event]:
    return [Content(text)] if text else []
