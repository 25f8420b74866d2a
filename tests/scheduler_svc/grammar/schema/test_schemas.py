"""Which schemas are rejected, naming the keyword and its place, and which are enforced."""

from __future__ import annotations

import json
import random
from itertools import combinations
from typing import Any

import pytest

from scheduler_svc.grammar.compiler import compile_grammar
from scheduler_svc.grammar.errors import GrammarError
from scheduler_svc.grammar.schema.errors import SchemaError
from scheduler_svc.grammar.schema.reader import enforced_text
from shared.sampling_params import GrammarKind
from tests.scheduler_svc.grammar.schema.walks import (
    allows,
    check_enforced,
    compilers,
    completions,
    mismatch,
)


def obj(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties], **more}


NUMBER, INTEGER, STRING = {"type": "number"}, {"type": "integer"}, {"type": "string"}
BOTH = {"allOf": [obj({"a": INTEGER}), {"type": "object", "required": ["b"]}]}
NAMED = {"type": "object", "propertyNames": {"enum": ["a", "b"]}}
DRAFT_7 = {"$schema": "http://json-schema.org/draft-07/schema#"}
LOOP = {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}
REJECTED: list[tuple[dict[str, Any], str]] = [
    # where a reference leads
    ({"$ref": "#/components/A", "components": {"A": BOTH}}, "'allOf' of more than one schema"),
    ({"$ref": "#/x/A", "x": {"A": {"not": {}}}}, "'not' is not supported (at #/x/A)"),
    ({"$ref": "#/x/A/0", "x": {"A": [{"if": {}}]}}, "'if' is not supported (at #/x/A/0)"),
    (obj({"a": {"contains": {}}, "b": {"$ref": "#/properties/a"}}), "'contains'"),
    ({"$ref": "#/$defs/a~1b%25", "$defs": {"a/b%": {"not": {}}}}, "(at #/$defs/a~1b%)"),
    ({"$ref": "#/x/$defs/b", "x": {"$defs": {"b": {"not": {}}}}}, "'not' is not supported (at #/x"),
    ({"$ref": "#/$defs/a", "$defs": {}}, "Cannot find field 'a' of '$ref' '#/$defs/a' (at #)"),
    ({"$ref": "#/enum/3", "enum": [1]}, "'enum' beside '$ref'"),
    ({"items": {"$ref": "other.json"}}, "'$ref' to 'other.json' is not supported, only to a part"),
    ({"items": {"$ref": "#name"}}, "'$ref' to '#name' is not supported, only to a part of itself"),
    ({"items": {"$ref": 3}}, "'$ref' must be a string (at #/items)"),
    ({"items": {"$ref": "#/title"}, "title": "T"}, "Schema should be an object or bool, but got"),
    ({"$ref": "#/$defs/a", "minimum": 1, "$defs": {"a": INTEGER}}, "'minimum' beside '$ref'"),
    ({"$ref": "#"}, "'$ref' leads back to itself (at #)"),
    ({"$ref": "#/$defs/a", "$defs": {"a": LOOP}}, "'$ref' leads back to itself (at #/$defs/a)"),
    (obj({"a": {"$ref": "#"}}), "no finite value matches (at #)"),
    ({"items": {"$ref": "#"}, "minItems": 1}, "no finite value matches (at #)"),
    ({"items": {"$id": "b", "items": {"$ref": "#"}}}, "'$ref' inside a schema with an '$id'"),
    ({"items": {"$ref": "#/$defs/b/not"}, "$defs": {"b": {"$id": "b"}}}, "into a schema with an"),
    ({"$ref": "#/a/\u0661", "a": [{}, INTEGER]}, "Cannot find field '\u0661'"),
    ({"$ref": f"#/a/{'1' * 5000}", "a": [{}]}, "Cannot find field '1111"),
    ({"type": "string", "anyOf": [{"$ref": "#/a"}], "a": {"type": 5}}, "'type' beside 'anyOf'"),
    ({"type": "string", "anyOf": [{"$ref": "#/a"}], "a": {"anyOf": 3}}, "'type' beside 'anyOf'"),
    # numbers
    (obj({"n": NUMBER | {"multipleOf": 0.5}}), "'multipleOf' a fraction is not supported"),
    (INTEGER | {"multipleOf": 7, "minimum": 1}, "'multipleOf' beside a single bound"),
    (INTEGER | {"multipleOf": 5000}, "'multipleOf' over 1024"),
    (INTEGER | {"multipleOf": 2, "minimum": 0, "maximum": 10**6}, "over 4096 multiples"),
    (INTEGER | {"multipleOf": 0}, "'multipleOf' must be over 0"),
    (INTEGER | {"minimum": 0.1, "maximum": 0.9}, "Invalid range: no integer is from 0.1 to 0.9"),
    (NUMBER | {"minimum": 1e-8, "maximum": 2e-8}, "Invalid range: no number with six decimals"),
    (NUMBER | {"exclusiveMaximum": True, "maximum": 3}, "'exclusiveMaximum' must be a number"),
    # names
    (obj({"a": {}}, propertyNames={"pattern": "^[b-c]$"}), "'propertyNames' excludes the property"),
    (obj({"a": INTEGER}, patternProperties={"^a$": {"const": 3}}), "'^a$' beside the property 'a'"),
    ({"type": "object", "patternProperties": {"a": INTEGER, "^a": STRING}}, "may overlap"),
    ({"type": "object", "minProperties": 2}, "'minProperties' 2 is not supported where a name may"),
    ({"type": "object", "propertyNames": {"anyOf": [{}]}}, "'anyOf' is not supported (at #/proper"),
    (obj({"a": False}), "no value matches the required property 'a'"),
    # combinations
    ({"oneOf": [INTEGER, NUMBER]}, "options 0 and 1 of 'oneOf' may overlap"),
    ({"oneOf": [{"type": "null"}, {"properties": {"a": {}}}]}, "options 0 and 1 of 'oneOf' may"),
    ({"oneOf": [{"enum": [1, "a"]}, {"const": 1.0}]}, "options 0 and 1 of 'oneOf' may overlap"),
    ({"oneOf": [STRING, {"$ref": "#/x"}], "x": {"minLength": 3, "type": "string"}}, "may overlap"),
    ({"oneOf": [obj({"a": {}}), obj({"a": {}, "b": {}})]}, "options 0 and 1 of 'oneOf'"),
    ({"const": {"a": [2**60]}}, "'const' has 1152921504606846976, which is over 2^53"),
    ({"type": "string", "pattern": "é\""}, "only may match what JSON escapes"),
    ({"$schema": "http://json-schema.org/draft-03/schema#"}, "'$schema' 'http://json-schema.org/"),
    (DRAFT_7 | {"prefixItems": [{}], "items": {}}, "'prefixItems' beside 'items' before draft"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "reason"), REJECTED, ids=lambda each: str(each)[:50])
def test_what_is_not_enforced_is_rejected(schema: dict[str, Any], reason: str) -> None:
    with pytest.raises(GrammarError) as caught:
        compile_grammar(compilers(), GrammarKind.JSON_SCHEMA, json.dumps(schema))
    assert reason in caught.value.reason
    assert " (at #" in caught.value.reason


UNSUPPORTED: list[dict[str, Any]] = [
    {"type": "array", "uniqueItems": True},
    {"type": "array", "contains": {"const": 5}},
    {"type": "string", "not": {"const": "a"}},
    {"if": STRING, "then": {"maxLength": 1}},
    {"allOf": [STRING, {"maxLength": 3}]},
    {"anyOf": [{"required": ["a"]}], "type": "object"},
    {"oneOf": [{}], "anyOf": [{}]},
    {"anyOf": [INTEGER, {}], "type": "integer"},
    {"anyOf": [NUMBER], "type": "integer"},
    {"$dynamicRef": "#a"},
    INTEGER | {"enum": ["a", 1]},
    {"type": "boolean", "const": 1},
    {"type": "object", "dependentRequired": {"a": ["b"]}},
    {"type": "object", "required": ["z"]},
    STRING | {"pattern": "a", "maxLength": 2},
    STRING | {"format": "date", "minLength": 2},
    STRING | {"format": "json-pointer"},
    {"minimum": 3},
    {"maxLength": 3},
    {"type": []},
    {"enum": ["a", -(2**70)]},
    {"anyOf": []},
    {"oneOf": []},
    {"allOf": []},
]


@pytest.mark.parametrize("schema", UNSUPPORTED, ids=json.dumps)
def test_what_is_not_enforced_anywhere_is_rejected_wherever_it_is(schema: dict[str, Any]) -> None:
    for place in (schema, {"items": schema, "type": "array"}, {"anyOf": [schema]}):
        with pytest.raises(SchemaError) as caught:
            enforced_text(json.dumps(place))
        assert any(f"'{keyword}'" in str(caught.value) for keyword in schema)


def test_values_of_listed_names_are_read_once() -> None:
    schema: dict[str, Any] = INTEGER
    for _ in range(20):
        schema = NAMED | {"additionalProperties": schema}
    assert len(enforced_text(json.dumps(schema))) < 10_000


def test_numbers_that_are_none_of_json_are_rejected() -> None:
    for text in ('{"const": NaN}', '{"enum": [[1e999]]}', '{"minimum": -Infinity}'):
        with pytest.raises(GrammarError, match="no number of JSON"):
            compile_grammar(compilers(), GrammarKind.JSON_SCHEMA, text)


ENFORCED: list[tuple[dict[str, Any], list[str]]] = [
    # annotations
    ({"type": "object", "nullable": True}, ['{"a":1}', "{}"]),
    ({"type": "object", "x-order": 1, "title": "T"}, ['{"a":{"b":[]}}']),
    ({"type": "object", "required": []}, ['{"a":1}']),
    ({"type": "object", "minProperties": 1}, ['{"a":1}']),
    ({"type": "array", "x-y": 1, "minItems": 2}, ["[1,{}]"]),
    ({"type": "integer", "minContains": 3, "then": False, "format": "int32"}, ["12"]),
    # several types, or none
    ({"type": ["integer", "string"], "minimum": 5, "maxLength": 3}, ["7", '"abc"']),
    ({"type": ["string", "number"], "enum": ["a", 1]}, ['"a"', "1"]),
    ({"type": ["string", "number"], "anyOf": [INTEGER, STRING]}, ["1", '"a"']),
    ({"properties": {"a": {"type": "null"}, "b": {"items": {"const": 1}}}}, ['{"a":null,"b":[1]}']),
    ({"items": {"type": "boolean"}, "minItems": 1, "maxItems": 3}, ["[true,false]"]),
    # values
    ({"enum": [1, "x", None, {"a": [1.5]}]}, ["1", "null", '{"a":[1.5]}']),
    ({"const": 'é"\n\\', "type": "string"}, ['"é\\"\\n\\\\"']),
    # forms that xgrammar takes for the same
    (
        obj({"a": obj({"title": STRING}), "b": obj({"title": INTEGER})}),
        ['{"a":{"title":"x"},"b":{"title":1}}'],
    ),
    ({"anyOf": [{"const": {"title": 1}}, {"const": {"title": 2}}]}, ['{"title":2}']),
    # further properties
    (
        {
            "type": "object",
            "properties": {"é": INTEGER, "title": STRING},
            "additionalProperties": {},
        },
        ['{"é":1,"x":[]}', '{"title":"a","titles":1,"t":2}', '{"":1}'],
    ),
    (obj({"a": INTEGER}, additionalProperties=True), ['{"a":1,"b":2}']),
    (obj({"a": INTEGER}, unevaluatedProperties=INTEGER), ['{"a":1,"b":2}']),
    (obj({"a": INTEGER}, patternProperties={"^b+$": STRING}), ['{"a":1,"bb":"c"}']),
    (
        {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": INTEGER},
        ['{"a":1,"b":2}', "{}"],
    ),
    (
        {"type": "object", "propertyNames": {"maxLength": 2}, "additionalProperties": INTEGER},
        ['{"ab":1}'],
    ),
    ({"type": "object", "properties": {"a": False, "b": INTEGER}}, ['{"b":1}', "{}"]),
    (
        obj({"a% b": NAMED | {"additionalProperties": obj({"c": INTEGER})}}),
        ['{"a% b":{"b":{"c":1}}}'],
    ),
    # references
    (obj({"a": {"$ref": "#/$defs/A"}}) | {"$defs": {"A": {"$id": "A", "const": 1}}}, ['{"a":1}']),
    ({"$ref": "#/a/1", "a": [{}, INTEGER], "b": {"$id": "B"}}, ["1"]),
    (DRAFT_7 | {"type": "array", "prefixItems": [INTEGER]}, ["[1]"]),
    # numbers
    (INTEGER | {"multipleOf": 7, "minimum": -10, "maximum": 10}, ["-7", "0", "7"]),
    (INTEGER | {"multipleOf": 1.5}, ["3", "-6"]),
    (NUMBER | {"multipleOf": 3}, ["9"]),
    (INTEGER | {"exclusiveMinimum": 1.5, "maximum": 3.5}, ["2", "3"]),
    (INTEGER | {"minimum": -(10**30), "maximum": 10**30}, ["0"]),
    (NUMBER | {"exclusiveMinimum": 0, "maximum": 0.1}, ["0.1", "0.000001"]),
    (NUMBER | {"exclusiveMaximum": 2.0**40}, ["1099511627775"]),
    # options that exclude each other
    ({"oneOf": [STRING, {"type": ["integer", "null"]}]}, ['"a"', "1", "null"]),
    ({"oneOf": [obj({"a": {}}), obj({"b": {}})]}, ['{"a":1}', '{"b":1}']),
    (
        {"oneOf": [{"type": "object", "properties": {"k": {"const": k}}} for k in "ab"]},
        ['{"k":"a"}', '{"k":"b"}'],
    ),
    ({"allOf": [{"$ref": "#/x"}, {"title": "T"}], "x": INTEGER}, ["1"]),
    # references
    ({"$ref": "#/x-a/b~1c/1", "x-a": {"b/c": [{}, INTEGER]}}, ["1"]),
    ({"$ref": "#/p%25/~0", "p%": {"~": STRING}}, ['"a"']),
    (obj({"a": INTEGER, "b": {"$ref": "#/properties/a"}}), ['{"a":1,"b":2}']),
    ({"type": "array", "items": {"$ref": "#"}, "$defs": {"unused": {"not": {}}}}, ["[[],[[]]]"]),
    (
        {"properties": {"$ref": STRING, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}},
        ['{"$ref":"a","next":{"next":null}}'],
    ),
    # arrays
    ({"type": "array", "uniqueItems": False, "items": {"$ref": "#"}}, ["[[],[]]"]),
    (
        {"type": "array", "prefixItems": [{"type": "null"}, {"const": 1}], "minItems": 2},
        ["[null,1]"],
    ),
    ({"type": "array", "items": False}, ["[]"]),
    (
        {"type": "array", "items": {"anyOf": [obj({"a": {"enum": [1, 2]}}), obj({"b": {}})]}},
        ['[{"a":1},{"b":[]}]'],
    ),
    # strings
    (STRING | {"pattern": '^[^"]{2}.[ -~](a|")$'}, ['"éé.~a"']),
    (STRING | {"format": "date"}, ['"2020-02-01"']),
    (STRING | {"format": "email"}, ['"a.b@c.de"']),
    (STRING | {"format": "uri", "minLength": 1}, ['"http://a.b"']),
    (STRING | {"format": "password", "maxLength": 2}, ['"ab"']),
    (STRING | {"pattern": "é."}, ['"éa"']),
    ({"type": "object", "patternProperties": {"é.": INTEGER}}, ['{"éa":1}']),
    (
        {"items": {"type": "string"}, "maxItems": 1, "type": "array", "prefixItems": [{}, {}]},
        ["[1]"],
    ),
]


@pytest.mark.parametrize(("schema", "values"), ENFORCED, ids=lambda each: json.dumps(each)[:50])
def test_what_is_accepted_is_enforced(schema: dict[str, Any], values: list[str]) -> None:
    check_enforced(schema, values)


@pytest.mark.parametrize("required", [(), ("b",), ("a", "c")])
def test_numbers_of_properties_are_exact(required: tuple[str, ...]) -> None:
    names = "abc"
    subsets = [each for size in range(4) for each in combinations(names, size)]
    for least in range(4):
        for most in range(max(least, len(required)), 4):
            schema = {
                **obj({name: {"const": 1} for name in names}),
                "required": [*required],
                "minProperties": least,
                "maxProperties": most,
            }
            for subset in subsets:
                text = json.dumps(dict.fromkeys(subset, 1))
                assert allows(schema, text) is not bool(mismatch(schema, text)), (schema, text)


def test_a_structural_tag_is_enforced_or_rejected() -> None:
    def compiled(schema: dict[str, Any], **more: Any) -> str:
        tag = {"type": "json_schema", "json_schema": schema, **more}
        text = json.dumps({"type": "structural_tag", "format": tag})
        return "".join(completions(GrammarKind.STRUCTURAL_TAG, text, random.Random(0), 1))

    assert compiled({"$ref": "#/x", "x": {"const": [1]}}) == "[1]"
    with pytest.raises(GrammarError, match=r"a 'json_schema' in it: 'not' is not supported"):
        compiled({"items": {"$ref": "#/x"}, "x": {"not": {}}})
    with pytest.raises(GrammarError, match="'any_order' is not supported"):
        compiled(obj({"a": INTEGER, "b": INTEGER}), any_order=True)
    with pytest.raises(GrammarError, match="'excludes' beside bounds of a length"):
        compiled(obj({"a": STRING | {"maxLength": 3}}), excludes=["x"])
    for style in ("qwen_xml", "deepseek_xml"):
        assert "a" in compiled(obj({"a": INTEGER}, additionalProperties=True), style=style)
