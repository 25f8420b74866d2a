"""Reads schemas of strings."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from scheduler_svc.grammar.schema import numbers
from scheduler_svc.grammar.schema.characters import ALL, JSON_ESCAPES, difference
from scheduler_svc.grammar.schema.errors import SchemaError
from scheduler_svc.grammar.schema.nodes import (
    EMPTY,
    NOTHING,
    Characters,
    Node,
    Repeat,
    any_but,
    restrict,
    to_json_text,
)
from scheduler_svc.grammar.schema.regex import RegexError, parse

_UNESCAPED = difference(ALL, JSON_ESCAPES)
_ATOM = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_LABEL = "[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?"
# xgrammar's own expression allows quoted names with wrong escapes.
_EMAIL = rf"{_ATOM}(\.{_ATOM})*@{_LABEL}(\.{_LABEL})*"
# The formats that xgrammar enforces. Those of the second line may be empty.
_FORMATS = ("date", "time", "date-time", "duration", "ipv4", "ipv6", "hostname", "uuid", "uri")
_EMPTY_FORMATS = ("uri-reference", "uri-template")
_NOT_JSON = ("json-pointer", "relative-json-pointer")  # xgrammar allows a bare quotation mark
_MAX_SHOWN = 50  # characters of an expression


def read_string(schema: dict[str, Any], place: str) -> dict[str, Any]:
    """The form of a schema of strings that xgrammar enforces."""
    least = numbers.count(schema, "minLength", place)
    most = numbers.count(schema, "maxLength", place)
    has_bounds = least is not None or most is not None
    if "pattern" in schema:
        if has_bounds:
            keyword = "maxLength" if least is None else "minLength"
            raise SchemaError(f"{keyword!r} beside 'pattern' is not supported", place)
        return _matching(pattern(schema["pattern"], place))
    form = schema.get("format")
    if form in _NOT_JSON:
        raise SchemaError(f"'format' {form!r} is not supported", place)
    if form == "email" or form in _FORMATS or form in _EMPTY_FORMATS:
        if most is not None or (least or 0) > (0 if form in _EMPTY_FORMATS else 1):
            keyword = "minLength" if most is None else "maxLength"
            raise SchemaError(f"{keyword!r} beside 'format' is not supported", place)
        return _matching(parse(_EMAIL)) if form == "email" else {"type": "string", "format": form}
    if least is not None and most is not None and least > most:
        raise SchemaError(f"Invalid range: no length is from {least} to {most}", place)
    bounds = {"minLength": least, "maxLength": most}
    return {"type": "string"} | {key: each for key, each in bounds.items() if each is not None}


def pattern(text: Any, place: str) -> Node:
    """Reads a `pattern`, without what JSON escapes."""
    if not isinstance(text, str):
        raise SchemaError("'pattern' must be a string", place)
    try:
        node = restrict(parse(text), _UNESCAPED)
    except RegexError as error:
        raise SchemaError(f"'pattern' {text[:_MAX_SHOWN]!r}: {error}", place) from error
    if node == NOTHING:
        reason = f"'pattern' {text[:_MAX_SHOWN]!r} only may match what JSON escapes"
        raise SchemaError(reason, place)
    return node


def any_string(least: int | None, most: int | None) -> Node:
    return Repeat(Characters(_UNESCAPED), least or 0, most) if most != 0 else EMPTY


def any_string_but(words: Iterable[str]) -> str:
    """The expression, for xgrammar, of strings that are none of `words`."""
    return to_json_text(any_but(words, _UNESCAPED))


def _matching(node: Node) -> dict[str, Any]:
    if node == EMPTY:
        return {"const": ""}
    return {"type": "string", "pattern": to_json_text(node)}
