"""Parses the JSON lines of a file of requests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from nano_vllm_grpc import Chat, Prompt, SamplingParams

Value = TypeVar("Value")

_TEXT: TypeAdapter[str] = TypeAdapter(str)
_TOKEN_IDS: TypeAdapter[list[int]] = TypeAdapter(list[int])
_CHAT: TypeAdapter[Chat] = TypeAdapter(Chat)
_CHAT_FIELDS = {field.name for field in fields(Chat)}
_PROMPTS = ("prompt", "messages", "token_ids")
_SAMPLING: TypeAdapter[SamplingParams] = TypeAdapter(SamplingParams)
_PARAMS = {field.name for field in fields(SamplingParams)}
# OpenAI's batches have `custom_id`, `method`, `url`, and a `body` with the other fields.
_OPENAI = {"custom_id": "id", "max_completion_tokens": "max_tokens"}
_IGNORED = {"method", "url", "model", "stream", "user", "metadata"}


class LineError(ValueError):
    """A line is not a valid request; the message says why."""


@dataclass(frozen=True)
class Line:
    """The fields of a line. Without an `id`, the line's number is its id."""

    id: str | int
    fields: Mapping[str, Any]

    def request(self, defaults: Mapping[str, Any]) -> tuple[Prompt, SamplingParams]:
        """Returns prompt and parameters, with `defaults` for those that the line leaves unset.

        Raises:
            LineError: a field is unknown or wrong.
        """
        given = [name for name in _PROMPTS if name in self.fields]
        if len(given) != 1:
            names = " and ".join(given) or "none"
            raise LineError(f"{names} given; give one of {', '.join(_PROMPTS)}")
        prompt_names = _CHAT_FIELDS if given == ["messages"] else set(given)
        params = {name: value for name, value in self.fields.items() if name not in prompt_names}
        return self._prompt(), _sampling_params({**defaults, **params})

    def _prompt(self) -> Prompt:
        if "prompt" in self.fields:
            return _validate(_TEXT, self.fields["prompt"], "prompt")
        if "token_ids" in self.fields:
            return _validate(_TOKEN_IDS, self.fields["token_ids"], "token_ids")
        chat = {name: value for name, value in self.fields.items() if name in _CHAT_FIELDS}
        return _validate(_CHAT, chat)


def parse_line(text: bytes, number: int) -> Line:
    """Raises LineError if the line is neither a string nor an object in JSON."""
    value = _parse(text)
    if isinstance(value, str):
        return Line(number, {"prompt": value})
    if not isinstance(value, dict) or not isinstance(value.get("body", {}), dict):
        raise LineError("neither a prompt nor an object with one")
    body = value.pop("body", {})
    found: dict[str, Any] = {
        _OPENAI.get(name, name): each
        for name, each in (value | body).items()
        if each is not None and name not in _IGNORED
    }
    line_id = found.pop("id", number)
    if not isinstance(line_id, str | int):
        raise LineError(f"id: {line_id!r} is neither a string nor an integer")
    return Line(line_id, found)


def parse_defaults(text: str) -> dict[str, Any]:
    """Parses a JSON object of sampling parameters.

    Raises:
        LineError: `text` is no such object, or a parameter is unknown or has another type.
    """
    values = _parse(text)
    if not isinstance(values, dict):
        raise LineError("not a JSON object")
    _sampling_params(values)
    return values


def _parse(text: str | bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise LineError(f"not JSON: {error}") from error


def _sampling_params(values: Mapping[str, Any]) -> SamplingParams:
    if unknown := values.keys() - _PARAMS:
        raise LineError(f"unknown fields: {', '.join(sorted(unknown))}")
    return _validate(_SAMPLING, values)


def _validate(adapter: TypeAdapter[Value], value: Any, name: str = "") -> Value:
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, (name, *first["loc"]) if name else first["loc"]))
        raise LineError(f"{where}: {first['msg']}, not {first['input']!r}") from error
