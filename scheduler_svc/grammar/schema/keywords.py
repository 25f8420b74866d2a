"""The keywords of JSON schemas that say what values match."""

from __future__ import annotations

REJECTED = (
    "not",
    "if",
    "contains",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "$dynamicRef",
    "$recursiveRef",
)
HEADS = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")  # a schema may have only one of them
STRING = ("pattern", "format", "minLength", "maxLength")
NUMBER = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
ARRAY = ("items", "prefixItems", "additionalItems", "minItems", "maxItems", "unevaluatedItems")
OBJECT = (
    "properties",
    "required",
    "additionalProperties",
    "patternProperties",
    "propertyNames",
    "minProperties",
    "maxProperties",
    "unevaluatedProperties",
)
ASSERTIONS = ("type", *STRING, *NUMBER, *ARRAY, *OBJECT)
TYPES = ("string", "number", "integer", "boolean", "null", "array", "object")
