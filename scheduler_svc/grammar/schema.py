"""Finds the parts of a JSON schema that a grammar would not enforce.

xgrammar silently ignores keywords that it does not know. It also ignores every keyword beside
`$ref`, `enum`, `anyOf` or a similar keyword. A completion that does not match its schema is worse
than an error, so such schemas are rejected. Schemas for which xgrammar would allow text that is not
JSON are rejected, too.

xgrammar reads some schemas more strictly than JSON Schema does, which is accepted. It leaves out
properties and items that a schema does not name beside others. Properties come in the schema's
order. A `pattern` matches the whole string. Patterns and bounds of the length leave out characters
that JSON escapes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

_LARGEST_EXACT = 2**53  # the largest integer that xgrammar, which reads doubles, does not round
MAX_DEPTH = 64  # of nested schemas; deeper ones take disproportionately long to compile

_IGNORED = ("not", "if", "contains", "dependentRequired", "dependentSchemas", "dependencies")
_NOT_JSON = ("json-pointer", "relative-json-pointer")  # formats that allow a bare quotation mark
_IGNORED_REFERENCES = ("$dynamicRef", "$recursiveRef")
_STRING = ("pattern", "format", "minLength", "maxLength")
_NUMBER = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_ARRAY = ("items", "prefixItems", "minItems", "maxItems", "unevaluatedItems")
_OBJECT = (
    "properties",
    "required",
    "additionalProperties",
    "patternProperties",
    "propertyNames",
    "minProperties",
    "maxProperties",
    "unevaluatedProperties",
)
_ASSERTIONS = ("type", *_STRING, *_NUMBER, *_ARRAY, *_OBJECT)
# xgrammar reads only the first of these that a schema has. It reads `oneOf` as `anyOf`.
_HEADS = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
_IS_TYPE = {
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}


def schema_problem(text: str) -> str:
    """The part of a JSON schema that cannot be enforced, or an empty string."""
    try:
        schema = json.loads(text)
    except ValueError as error:
        return f"is not JSON: {error}"
    except RecursionError:
        return f"is nested more than {MAX_DEPTH} deep"
    return next(_problems(schema, 0), "")


def patterns(text: str) -> set[str]:
    """All regular expressions in a JSON schema that has no problem."""
    return set(_patterns(json.loads(text)))


def json_formats(tag: Any, depth: int = 0) -> Iterator[dict[str, Any]]:
    """Yields the formats in a structural tag that have a `json_schema`.

    Raises:
        ValueError: the tag is nested too deep.
    """
    if depth > MAX_DEPTH:
        raise ValueError(f"is nested more than {MAX_DEPTH} deep")
    if isinstance(tag, dict):
        if "json_schema" in tag:
            yield tag
        tag = [value for name, value in tag.items() if name != "json_schema"]
    for value in tag if isinstance(tag, list) else ():
        yield from json_formats(value, depth + 1)


def _patterns(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        if isinstance(pattern := schema.get("pattern"), str):
            yield pattern
        if isinstance(properties := schema.get("patternProperties"), dict):
            yield from properties
        for subschema in _subschemas(schema):
            yield from _patterns(subschema)


def _problems(schema: Any, depth: int) -> Iterator[str]:
    if not isinstance(schema, dict):
        return  # true or false; the grammar's compiler rejects anything else
    if depth > MAX_DEPTH:
        yield f"is nested more than {MAX_DEPTH} deep"
        return
    for keyword in (*_IGNORED, *_IGNORED_REFERENCES):
        if keyword in schema:
            yield f"{keyword!r} is not supported"
    if schema.get("uniqueItems"):
        yield "'uniqueItems' is not supported"
    for keyword, values in (("const", [schema.get("const")]), ("enum", schema.get("enum"))):
        for value in values if isinstance(values, list) else ():
            if isinstance(value, int) and abs(value) > _LARGEST_EXACT:
                yield f"{keyword!r} has {value}, which is over 2^53"
    for keyword in ("type", "anyOf", "oneOf", "allOf"):
        if schema.get(keyword) == []:
            yield f"{keyword!r} must not be empty"
    head = next((keyword for keyword in _HEADS if keyword in schema), None)
    yield from _head_problems(schema, head) if head else _type_problems(schema)
    if isinstance(names := schema.get("propertyNames"), dict) and "type" not in names:
        schema = {**schema, "propertyNames": {"type": "string", **names}}  # names are strings
    for subschema in _subschemas(schema):
        yield from _problems(subschema, depth + 1)


def _head_problems(schema: dict[str, Any], head: str) -> Iterator[str]:
    for keyword in (*_HEADS, *_ASSERTIONS):
        if keyword in schema and keyword != head and not _says_nothing_new(schema, keyword, head):
            yield f"{keyword!r} beside {head!r} is not supported"
    if head == "$ref" and not str(schema["$ref"]).startswith("#/") and schema["$ref"] != "#":
        yield f"'$ref' to {str(schema['$ref'])[:50]!r} is not supported, only to a part of itself"
    if head == "allOf" and isinstance(schema["allOf"], list) and len(schema["allOf"]) > 1:
        yield "'allOf' of more than one schema is not supported"


def _says_nothing_new(schema: dict[str, Any], keyword: str, head: str) -> bool:
    """Whether `keyword` is a type that all values or schemas of `head` have anyway."""
    if keyword != "type" or head == "$ref":
        return False
    values = [schema["const"]] if head == "const" else schema[head]
    types = _types(schema)
    if not isinstance(values, list):
        return False
    if head in ("const", "enum"):
        return all(any(_IS_TYPE[name](value) for name in types) for value in values)
    return all(_has_type(value, types) for value in values)


def _has_type(schema: Any, types: list[str]) -> bool:
    """Whether every value that matches a schema is of one of `types`."""
    if not isinstance(schema, dict) or any(head in schema for head in _HEADS):
        return False
    own = _types(schema) if "type" in schema else []
    if "type" not in schema and (read := _read_untyped(schema)):
        own = ["object" if read is _OBJECT else "array"]
    return bool(own) and all(
        name in types or (name == "integer" and "number" in types) for name in own
    )


def _type_problems(schema: dict[str, Any]) -> Iterator[str]:
    if "type" not in schema:
        for keyword in (*_STRING, *_NUMBER, *_ARRAY, *_OBJECT):
            if keyword in schema and keyword not in _read_untyped(schema):
                yield f"{keyword!r} without 'type' is not supported"
    for whole in ("pattern", "format"):
        for keyword in _STRING:
            if whole in schema and keyword in schema and keyword != whole:
                yield f"{keyword!r} beside {whole!r} is not supported"
    if schema.get("format") in _NOT_JSON:
        yield f"'format' {schema['format']!r} is not supported"
    required, properties = schema.get("required"), schema.get("properties", {})
    if isinstance(required, list) and isinstance(properties, dict):
        for name in required:
            if name not in properties:
                yield f"'required' names {str(name)[:50]!r}, which is none of its properties"


def _read_untyped(schema: dict[str, Any]) -> tuple[str, ...]:
    """The keywords that a schema may have without a type, because others make the type clear."""
    if "properties" in schema:
        return _OBJECT
    return _ARRAY if "items" in schema else ()


def _types(schema: dict[str, Any]) -> list[str]:
    types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    return [name for name in types if isinstance(name, str) and name in _IS_TYPE]


def _subschemas(schema: dict[str, Any]) -> Iterator[Any]:
    for keyword in ("properties", "patternProperties", "$defs", "definitions"):
        if isinstance(schema.get(keyword), dict):
            yield from schema[keyword].values()
    for keyword in ("prefixItems", "anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(keyword), list):
            yield from schema[keyword]
    for keyword in (
        "items",
        "additionalProperties",
        "propertyNames",
        "unevaluatedItems",
        "unevaluatedProperties",
    ):
        yield schema.get(keyword)
