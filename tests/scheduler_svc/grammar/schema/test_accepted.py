"""Schemas as pydantic, zod, OpenAI's strict mode and people write them. They must stay accepted."""

from __future__ import annotations

from decimal import Decimal
from enum import Enum
from typing import Annotated, Any, Literal
from uuid import UUID

import pytest
from pydantic import AnyUrl, BaseModel, ConfigDict, Field

from tests.scheduler_svc.grammar.schema.walks import check_enforced


class Color(Enum):
    RED = "red"
    BLUE = "blue"


class Cat(BaseModel):
    """A tag with a default, so that it is not required."""

    kind: Literal["cat"] = "cat"
    lives: int = Field(9, ge=0, le=9)


class Dog(BaseModel):
    kind: Literal["dog"]
    weight: float | None = None


class Node(BaseModel):
    value: Annotated[str, Field(min_length=1, max_length=5)]
    children: list[Node] = []


class Everything(BaseModel):
    model_config = ConfigDict(extra="allow", title="All")

    title: str
    price: Decimal
    id: UUID
    url: AnyUrl
    color: Color
    pet: Cat | Dog = Field(discriminator="kind")
    either: Cat | Dog
    counts: dict[str, int]
    by_color: dict[Color, int]
    by_id: dict[UUID, int]
    pair: tuple[int, str]
    some: Annotated[list[int], Field(min_length=1, max_length=3)]
    code: Annotated[str, Field(pattern=r"^[A-Z]{2}-\d{3}$")]
    ratio: Annotated[float, Field(gt=0, lt=1)]
    step: Annotated[int, Field(multiple_of=5)]
    anything: Any
    tree: Node
    flag: bool = False


EVERYTHING = (
    '{"title":"a","price":1.5,"id":"01234567-89ab-cdef-0123-456789abcdef","url":"http://a.b/c",'
    '"color":"red","pet":{"kind":"cat","lives":3},"either":{"kind":"dog","weight":null},'
    '"counts":{"a":1},"by_color":{"blue":2},"by_id":{},"pair":[1,"x"],"some":[1,2],"code":"AB-123",'
    '"ratio":0.5,"step":15,"anything":{"a":[null]},"tree":{"value":"v","children":[{"value":"w"}]},'
    '"flag":true,"more":[1]}'
)
# Of zod, by z.toJSONSchema, with the draft that it names.
ZOD = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 20},
        "id": {
            "type": "string",
            "format": "uuid",
            "pattern": "^([0-9a-f]{8}-[0-9a-f]{4}-[1-8][0-9a-f]{3}-[89ab][0-9a-f]{15})$",
        },
        "age": {"type": "integer", "exclusiveMinimum": 0, "maximum": 9007199254740991},
        "nick": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "role": {"type": "string", "enum": ["admin", "user"]},
        "shape": {
            "oneOf": [
                {
                    "type": "object",
                    "properties": {
                        "kind": {"type": "string", "const": kind},
                        name: {"type": "number"},
                    },
                    "required": ["kind", name],
                    "additionalProperties": False,
                }
                for kind, name in (("circle", "radius"), ("square", "side"))
            ]
        },
        "pair": {"type": "array", "prefixItems": [{"type": "string"}, {"type": "number"}]},
        "scores": {
            "type": "object",
            "propertyNames": {"type": "string", "enum": ["a", "b"]},
            "additionalProperties": {"type": "number"},
            "required": ["a", "b"],
        },
        "loose": {
            "type": "object",
            "propertyNames": {"type": "string"},
            "additionalProperties": {},
        },
        "again": {"$ref": "#"},
    },
    "required": ["name", "age", "role", "shape"],
    "additionalProperties": False,
}
ZOD_DRAFT_7 = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "$ref": "#/definitions/Pair",
    "definitions": {
        "Pair": {
            "type": "array",
            "minItems": 2,
            "maxItems": 2,
            "items": [{"type": "string"}, {"$ref": "#/definitions/Pair/items/0"}],
        }
    },
}
STRICT = {  # OpenAI's strict mode
    "type": "object",
    "properties": {
        "steps": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"explanation": {"type": "string"}, "output": {"type": "string"}},
                "required": ["explanation", "output"],
                "additionalProperties": False,
            },
        },
        "email": {
            "type": "string",
            "description": "of the user",
            "pattern": r"^[a-zA-Z0-9._%+-]+@[a-zA-Z0-9.-]+\.[a-zA-Z]{2,}$",
        },
        "unit": {"type": ["string", "null"], "enum": ["F", "C", None]},
        "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
    },
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
            "required": ["next"],
            "additionalProperties": False,
        }
    },
    "required": ["steps", "email", "unit", "next"],
    "additionalProperties": False,
}
OPENAPI = {
    "openapi": "3.0.0",
    "$ref": "#/components/schemas/Pet",
    "components": {
        "schemas": {
            "Pet": {
                "type": "object",
                "required": ["id", "tag"],
                "properties": {
                    "id": {"type": "integer", "format": "int64", "minimum": -(2**63), "example": 1},
                    "tag": {
                        "allOf": [{"$ref": "#/components/schemas/Tag"}, {"description": "its"}]
                    },
                    "owner": {"type": "string", "nullable": True, "readOnly": True},
                    "meta": {"type": "object", "x-order": 3, "nullable": True},
                },
                "discriminator": {"propertyName": "tag"},
                "x-go-type": "Pet",
            },
            "Tag": {"type": "string", "maxLength": 3, "xml": {"name": "t"}, "externalDocs": {}},
        }
    },
}
DESCRIBED = {  # with properties that are named as annotations are
    "$id": "https://example.com/schema.json",
    "$comment": "one",
    "type": "object",
    "properties": {
        "title": {"type": "string", "title": "Title", "maxLength": 3},
        "default": {"type": "integer", "default": 3, "deprecated": True},
        "$comment": {"$id": "#/properties/comment", "type": "null"},
        "x-y": {"type": "boolean", "examples": [True]},
    },
    "required": ["title", "default", "$comment", "x-y"],
}
PATTERNS = {
    "type": "object",
    "patternProperties": {"^S_[a-z]+$": {"type": "string"}, "^I_[a-z]+$": {"type": "integer"}},
    "additionalProperties": False,
}
RESPONSES = {
    "type": "object",
    "oneOf": [
        {"properties": {"error": {"type": "string"}}, "required": ["error"]},
        {"properties": {"ok": {"type": "boolean"}, "rev": {"type": "string"}}, "required": ["ok"]},
    ],
}
ACCEPTED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "pydantic": (Everything.model_json_schema(), [EVERYTHING]),
    "zod": (
        ZOD,
        [
            '{"name":"a","age":3,"nick":null,"role":"user","shape":{"kind":"square","side":1.5}}',
            '{"name":"a","id":"01234567-89ab-4def-8123456789abcdef","age":3,"role":"user",'
            '"shape":{"kind":"circle","radius":1},"pair":["a",1],"scores":{"a":1,"b":2},'
            '"loose":{"x":[]}}',
        ],
    ),
    "zod, draft 7": (ZOD_DRAFT_7, ['["a","b"]']),
    "OpenAI's strict mode": (
        STRICT,
        [
            '{"steps":[{"explanation":"é","output":"\\n"}],"email":"a@b.cd","unit":null,'
            '"next":{"next":null}}'
        ],
    ),
    "OpenAPI": (OPENAPI, ['{"id":-9,"tag":"abc","owner":"x","meta":{"a":1}}', '{"id":1,"tag":""}']),
    "annotations": (DESCRIBED, ['{"title":"abc","default":1,"$comment":null,"x-y":true}']),
    "patterns of names": (PATTERNS, ['{"S_a":"x","I_b":1}', "{}"]),
    "exclusive responses": (RESPONSES, ['{"error":"a"}', '{"ok":true,"rev":"1"}']),
    "a tool without arguments": ({"type": "object", "properties": {}}, ["{}"]),
    "a tool of MCP": (
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "type": "object",
            "properties": {
                "path": {"type": "string"},
                "edits": {
                    "type": "array",
                    "items": {"type": "object", "properties": {"old": {"type": "string"}}},
                },
                "dryRun": {"type": "boolean", "default": False},
            },
            "required": ["path", "edits"],
            "additionalProperties": False,
        },
        ['{"path":"/a","edits":[{"old":"b"},{}]}'],
    ),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_a_usual_schema_is_enforced(name: str) -> None:
    check_enforced(*ACCEPTED[name])
