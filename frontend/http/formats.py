from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    text: str


Event = Content | Reasoning | CallBegin | CallArguments


class ToolFormat(enum.Enum):
    HERMES = "<tool_call>"

    @property
    def mark(self) -> str:
        return self.value


def tool_format(template: str) -> ToolFormat:
    return ToolFormat.HERMES


def reasons(template: str) -> bool:
    return "</think>" in template


class AnswerParser:
    def __init__(self, *, reasoning: str, tools: ToolFormat | None) -> None: ...
    def feed(self, text: str) -> list[Event]:
        return [Content(text)] if text else []

    def finish(self) -> list[Event]:
        return []


def forced_calls(format: ToolFormat, functions: Sequence[Any], *, parallel: bool) -> dict[str, Any]:
    return {}
