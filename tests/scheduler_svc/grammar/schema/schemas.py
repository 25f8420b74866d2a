"""Random JSON schemas: each pair of keywords, alone and in some place of a larger schema."""

from __future__ import annotations

import random
from itertools import combinations_with_replacement
from typing import Any

from scheduler_svc.grammar.schema import keywords

_LEAVES: list[Any] = [
    {},
    True,
    False,
    {"type": "integer"},
    {"type": "string"},
    {"type": "null"},
    {"type": "number", "maximum": 3},
    {"type": "string", "maxLength": 2},
    {"type": "string", "pattern": "^[ab]{1,2}$"},
    {"const": "a"},
    {"enum": ["a", 1, None]},
    {"type": "boolean"},
    {"type": "array", "items": {"type": "integer"}},
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    {"type": "object", "additionalProperties": {"type": "integer"}},
    {"$ref": "#/$defs/small"},
    {"$ref": "#/properties/a"},
    {"$ref": "#"},
    {"properties": {"a": {"const": 1}}},
    {"properties": {"title": {"type": "integer"}}},
    {"type": "object", "properties": {"a": {"const": "x"}}},
    {"type": "object", "properties": {"a": {"enum": ["y", 1.0]}, "b": {}}, "required": ["b"]},
    {"minimum": 2},
    {"required": ["a"]},
]
_NAMES = ["a", "b", "title", "é", 'q"', "default", "", "a/b", "x~y"]
_PATTERNS = [
    "^a$",
    "a",
    "^[a-c]+$",
    "^(a|b){2}$",
    "^(?:[ab]{2,})?$",
    "^S_",
    "^x?$",
    "",
    "[^a]",
    "^a.b$",
    r"^\d{1,3}$",
    r"^\S+$",
    r"^\W$",
    r"\D",
    r"[\^a]",
    "é.",
    'a"?',
    "^a|b$",
    "a$b",
    "^(?!a)[ab]$",
    "^(?=.*b)[ab]{2}$",
    r"\bab",
    r"(a)\1",
    "(?i)a",
    "^(a+)+$",
    "^[ -~]*$",
    "^$",
]
_NUMBERS: list[Any] = [0, 1, -3, 7, 2.5, -0.5, 1e-7, 100, 0.1, 1e10, 2**53, 12345.678, 10**19]
_COUNTS: list[Any] = [0, 1, 2, 3, 2.0]
_FORMATS = [
    "date",
    "time",
    "date-time",
    "duration",
    "ipv4",
    "ipv6",
    "hostname",
    "uuid",
    "uri",
    "uri-reference",
    "uri-template",
    "email",
    "json-pointer",
    "int32",
    "password",
    "regex",
]
_REFERENCES = [
    "#/$defs/small",
    "#/definitions/a~1b",
    "#/$defs/list",
    "#/x-more/deep/0",
    "#/$defs/p%25",
    "#",
    "#/properties/a",
    "#/nowhere",
    "http://a/b",
    "#small",
    "#/$defs/loop",
]
_TYPES: list[Any] = [
    *keywords.TYPES,
    ["string", "null"],
    ["integer", "number"],
    ["object", "array"],
    ["integer", "string"],
]
_VALUES: list[Any] = ["a", "b", 1, 1.0, 1.5, -7, None, True, [], {}, [1, "a"], {"title": 1}, "é\n"]


def _schema(rng: random.Random, depth: int = 0) -> Any:
    if depth > 1 or rng.random() < 0.7:
        return rng.choice(_LEAVES)
    return pair(rng, *(rng.choice([*KEYWORDS]) for _ in "ab"), depth=depth + 1)


def _schemas(rng: random.Random, depth: int) -> list[Any]:
    return [_schema(rng, depth) for _ in range(rng.randint(1, 3))]


def _mapping(rng: random.Random, depth: int, names: list[str]) -> dict[str, Any]:
    return {rng.choice(names): _schema(rng, depth) for _ in range(rng.randint(0, 3))}


def _names(rng: random.Random) -> list[str]:
    return rng.sample(_NAMES, rng.randint(0, 2))


KEYWORDS: dict[str, Any] = {
    "type": lambda rng, _: rng.choice(_TYPES),
    "const": lambda rng, _: rng.choice(_VALUES),
    "enum": lambda rng, _: rng.sample(_VALUES, rng.randint(1, 4)),
    "anyOf": _schemas,
    "oneOf": _schemas,
    "allOf": _schemas,
    "not": _schema,
    "if": _schema,
    "then": _schema,
    "else": _schema,
    "$ref": lambda rng, _: rng.choice(_REFERENCES),
    "pattern": lambda rng, _: rng.choice(_PATTERNS),
    "format": lambda rng, _: rng.choice(_FORMATS),
    "minLength": lambda rng, _: rng.choice(_COUNTS),
    "maxLength": lambda rng, _: rng.choice(_COUNTS),
    "minimum": lambda rng, _: rng.choice(_NUMBERS),
    "maximum": lambda rng, _: rng.choice(_NUMBERS),
    "exclusiveMinimum": lambda rng, _: rng.choice(_NUMBERS),
    "exclusiveMaximum": lambda rng, _: rng.choice(_NUMBERS),
    "multipleOf": lambda rng, _: rng.choice([1, 2, 3, 0.5, 1.5, 0.01, 7, 5000, 2.0]),
    "items": _schema,
    "prefixItems": _schemas,
    "minItems": lambda rng, _: rng.choice(_COUNTS),
    "maxItems": lambda rng, _: rng.choice(_COUNTS),
    "uniqueItems": lambda rng, _: rng.random() < 0.5,
    "contains": _schema,
    "minContains": lambda rng, _: rng.choice(_COUNTS),
    "maxContains": lambda rng, _: rng.choice(_COUNTS),
    "unevaluatedItems": _schema,
    "additionalItems": _schema,
    "properties": lambda rng, depth: _mapping(rng, depth, _NAMES),
    "required": lambda rng, _: _names(rng),
    "additionalProperties": _schema,
    "patternProperties": lambda rng, depth: _mapping(rng, depth, _PATTERNS),
    "propertyNames": lambda rng, depth: rng.choice(
        [
            {"enum": ["a", "b"]},
            {"pattern": rng.choice(_PATTERNS)},
            {"maxLength": 2},
            _schema(rng, depth),
        ]
    ),
    "minProperties": lambda rng, _: rng.choice(_COUNTS),
    "maxProperties": lambda rng, _: rng.choice(_COUNTS),
    "unevaluatedProperties": _schema,
    "dependentRequired": lambda rng, _: {"a": _names(rng)},
    "dependentSchemas": lambda rng, depth: _mapping(rng, depth, _NAMES),
    "$id": lambda rng, _: rng.choice(["http://x/y", "part", "#/a"]),
    "$dynamicRef": lambda rng, _: "#",
    "title": lambda rng, _: "T",
    "default": lambda rng, _: rng.choice(_VALUES),
    "nullable": lambda rng, _: True,
    "x-more": lambda rng, _: {"deep": [{"type": "integer"}]},
    "discriminator": lambda rng, _: {"propertyName": "a"},
    "contentEncoding": lambda rng, _: "base64",
}
_OF_TYPE = {
    "string": keywords.STRING,
    "number": keywords.NUMBER,
    "array": (*keywords.ARRAY, "uniqueItems", "contains", "minContains", "maxContains"),
    "object": (*keywords.OBJECT, "dependentRequired", "dependentSchemas"),
}
PAIRS = [*combinations_with_replacement(KEYWORDS, 2)]
_DEFINITIONS: dict[str, Any] = {
    "$defs": {
        "small": {"type": "integer", "minimum": 0, "maximum": 3},
        "list": {"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#/$defs/list"}}]},
        "p%": {"type": "null", "title": "%"},
        "loop": {"anyOf": [{"$ref": "#/$defs/loop"}, {"type": "null"}]},
    },
    "definitions": {"a/b": {"type": "string", "maxLength": 1}},
    "x-more": {"deep": [{"type": "integer", "maximum": 5}]},
}


def pair(rng: random.Random, *names: str, depth: int = 0) -> dict[str, Any]:
    """A schema with these keywords, and mostly a type for which they matter."""
    schema = {keyword: KEYWORDS[keyword](rng, depth) for keyword in names}
    fitting = [name for name, own in _OF_TYPE.items() if any(each in own for each in names)]
    if "type" not in schema and fitting and rng.random() < 0.8:
        name = rng.choice(fitting)
        schema["type"] = rng.choice(["number", "integer"]) if name == "number" else name
    if "required" in schema and rng.random() < 0.8:
        named = schema["required"] + _names(rng)
        schema.setdefault("properties", {name: _schema(rng, depth + 1) for name in named})
    return schema


def document(rng: random.Random, schema: dict[str, Any]) -> dict[str, Any]:
    """A document that applies a schema somewhere, with what references may need."""
    match rng.randrange(6):
        case 0:
            root = {"type": "array", "items": schema, "maxItems": 2}
        case 1:
            root = {"type": "object", "properties": {"a": schema, "b": _schema(rng, 1)}}
        case 2:
            root = {"anyOf": [schema, {"type": "null"}]}
        case 3:
            root = {"$ref": "#/$defs/it", "title": "T"}
        case _:
            root = schema
    root = {**_DEFINITIONS, **root}
    root["$defs"] = {**root["$defs"], "it": schema}
    if rng.random() < 0.1:
        root["$schema"] = rng.choice(
            [
                "http://json-schema.org/draft-07/schema#",
                "https://json-schema.org/draft/2020-12/schema",
            ]
        )
    return root
