"""Finds out whether no value can match two options of `oneOf`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from scheduler_svc.grammar.schema.document import Document
from scheduler_svc.grammar.schema.errors import SchemaError

_NAMES = {str: "string", bool: "boolean", type(None): "null", list: "array", dict: "object"}


@dataclass(slots=True)
class Union:
    """The options of a `oneOf`, as in the document and in the form for xgrammar."""

    options: list[Any]
    forms: list[Any]
    place: str


def type_of(value: Any) -> str:
    if isinstance(value, float) and not value.is_integer():
        return "number"
    return _NAMES.get(type(value), "integer")


def is_of_type(value: str, types: set[str]) -> bool:
    return value in types or (value == "integer" and "number" in types)


def types_of(
    document: Document,
    schema: Any,
    place: str,
    untyped: Callable[[Any], set[str]] | None = None,
    seen: set[int] | None = None,
) -> set[str] | None:
    """The types of all values that match a schema; None if they may be any.

    Args:
        untyped: the types of the values that a completion has for a schema without `type`.
        seen: the schemas whose types are known already.
    """
    schema = document.resolve(schema, place)
    seen = set() if seen is None else seen
    if id(schema) in seen:
        return set()
    if isinstance(schema, dict):
        seen.add(id(schema))
    if not isinstance(schema, dict):
        return None if schema else set()
    if (values := _values(schema)) is not None:
        return {type_of(value) for value in values}
    for keyword in ("anyOf", "oneOf"):
        if keyword in schema and isinstance(schema[keyword], list):
            found = [types_of(document, each, place, untyped, seen) for each in schema[keyword]]
            known = [each for each in found if each is not None]
            return set().union(*known) if len(known) == len(found) else None
    if "type" in schema:
        types = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
        return {*map(str, types)} if isinstance(types, list) else None  # else rejected later
    return (untyped(schema) if untyped else None) or None


def separate(union: Union, document: Document, target: Callable[[Any], Any]) -> None:
    """Makes sure that a completion of one option matches no other, as all may come in an `anyOf`.

    If two options differ in the values of a property that neither requires, their forms are changed
    to require it.

    Args:
        target: follows the references in a form.

    Raises:
        SchemaError: options may overlap.
    """
    options = [
        _Option.read(option, target(form), union.place, document)
        for option, form in zip(union.options, union.forms, strict=True)
    ]
    for (i, one), (j, other) in combinations(enumerate(options), 2):
        if _never_matches(one, other) and _never_matches(other, one):
            continue
        shared = next(_tags(one, other), None)
        if shared is None:
            reason = f"options {i} and {j} of 'oneOf' may overlap, which is not supported"
            raise SchemaError(reason, union.place)
        for index, option in ((i, one), (j, other)):
            if shared not in option.always:
                option.always.add(shared)
                form = target(union.forms[index])
                union.forms[index] = {**form, "required": [*form["required"], shared]}


@dataclass(slots=True)
class _Option:
    """An option of `oneOf`. `types` and `values` are those that match it; None: any.

    The other fields are about objects with named properties, and empty for other completions.
    `properties` has the listed values of each property, or None. `required` and `always` name the
    properties that are required, and that each completion has. `names` are the only properties that
    a completion may have. `is_closed` says that an object with others does not match.
    """

    types: set[str] | None
    values: set[str] | None
    properties: dict[str, set[str] | None]
    required: set[str]
    always: set[str]
    names: set[str] | None
    is_closed: bool

    @classmethod
    def read(cls, option: Any, form: dict[str, Any], place: str, document: Document) -> _Option:
        schema = document.resolve(option, place)
        types, values = types_of(document, schema, place), _keys(schema)
        if "properties" not in form or not isinstance(schema, dict):
            return cls(types, values, {}, set(), set(), None, False)
        properties = {
            name: _keys(document.resolve(each, place))
            for name, each in schema.get("properties", {}).items()
        }
        required = set(schema.get("required", ()))
        names = None if "patternProperties" in form else {*form["properties"]}
        is_closed = schema.get("additionalProperties") is False
        return cls(
            types,
            values,
            properties,
            required,
            {*required},
            names,
            is_closed and not schema.get("patternProperties"),
        )


def _never_matches(one: _Option, other: _Option) -> bool:
    """Whether no completion of one option matches the other."""
    if one.types is not None and other.types is not None and not _overlap(one.types, other.types):
        return True
    if one.values is not None and other.values is not None and not one.values & other.values:
        return True
    if any(name in one.always | other.required for name in _tags(one, other)):
        return True
    if other.is_closed and not one.always <= other.properties.keys():
        return True
    return one.names is not None and not other.required <= one.names


def _tags(one: _Option, other: _Option) -> Iterator[str]:
    """The properties that have other values in one option than in the other."""
    for name, values in one.properties.items():
        others = other.properties.get(name)
        if values is not None and others is not None and not values & others:
            yield name


def _overlap(one: set[str], other: set[str]) -> bool:
    return any(is_of_type(each, other) for each in one) or any(
        is_of_type(each, one) for each in other
    )


def _values(schema: Any) -> list[Any] | None:
    if not isinstance(schema, dict):
        return None
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if isinstance(values, list) else None


def _keys(schema: Any) -> set[str] | None:
    """The values of a schema with `const` or `enum`, as texts; equal values have equal texts."""
    if (values := _values(schema)) is None:
        return None
    return {json.dumps(_plain(value), sort_keys=True) for value in values}


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value
