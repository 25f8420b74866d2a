"""Rewrites the JSON schemas and regular expressions in structural tags."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from scheduler_svc.grammar.schema.errors import SchemaError
from scheduler_svc.grammar.schema.nodes import to_text
from scheduler_svc.grammar.schema.reader import MAX_DEPTH, enforced
from scheduler_svc.grammar.schema.regex import RegexError, parse


def enforce(tag: Any, max_whitespace: int | None) -> bool:
    """Gives schemas and expressions in a structural tag the forms that xgrammar enforces. Returns
    whether there are schemas.

    Raises:
        ValueError: a part of the tag cannot be enforced.
    """
    formats = list(_formats(tag, 0))
    for each in formats:
        try:
            if "json_schema" not in each:
                each["pattern"] = to_text(parse(each["pattern"]))
                continue
            if each.get("any_order"):
                raise SchemaError("'any_order' is not supported", "#")
            is_json = each.get("style", "json") == "json"
            each["json_schema"] = enforced(each["json_schema"], with_further=is_json)
            if each.get("excludes") and _has_lengths(each["json_schema"]):
                raise SchemaError("'excludes' beside bounds of a length is not supported", "#")
        except SchemaError as error:
            raise ValueError(f"a 'json_schema' in it: {error}") from error
        except RegexError as error:
            raise ValueError(f"a 'regex' in it: {error}") from error
        each.setdefault("max_whitespace_cnt", max_whitespace)
    return any("json_schema" in each for each in formats)


def _formats(tag: Any, depth: int) -> Iterator[dict[str, Any]]:
    """Yields the formats that have a JSON schema or an expression."""
    if depth > MAX_DEPTH:
        raise ValueError(f"is nested more than {MAX_DEPTH} deep")
    if isinstance(tag, dict):
        if "json_schema" in tag or (
            tag.get("type") == "regex" and isinstance(tag.get("pattern"), str)
        ):
            yield tag
        tag = [value for name, value in tag.items() if name != "json_schema"]
    for value in tag if isinstance(tag, list) else ():
        yield from _formats(value, depth + 1)


def _has_lengths(form: Any) -> bool:
    """xgrammar ignores them where it excludes texts."""
    if isinstance(form, dict):
        if form.get("type") == "string" and ("minLength" in form or "maxLength" in form):
            return True
        form = [*form.values()]
    return isinstance(form, list) and any(map(_has_lengths, form))
