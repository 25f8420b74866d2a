"""Finds schemas that no finite value matches."""

from __future__ import annotations

from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from typing import Any

from scheduler_svc.grammar.schema.errors import SchemaError

DEFINED = "#/$defs/"


def check_finite(definitions: dict[str, Any], places: dict[str, str]) -> None:
    """Rejects references that lead back to themselves, and schemas that no finite value matches.

    Args:
        definitions: schemas in the form for xgrammar.
        places: where each was in the document.
    """
    graph = {name: _in_place(schema) for name, schema in definitions.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        first = next(name for name in places if name in error.args[1])
        raise SchemaError("'$ref' leads back to itself", places[first]) from error
    finite: set[str] = set()
    while more := {
        name
        for name, schema in definitions.items()
        if name not in finite and _can_end(schema, finite)
    }:
        finite |= more
    for name, place in places.items():
        if name not in finite:
            raise SchemaError("no finite value matches", place)


def _in_place(schema: Any) -> Iterator[str]:
    """The definitions that apply to the same value as a schema."""
    if isinstance(schema, dict):
        if "$ref" in schema:
            yield schema["$ref"].removeprefix(DEFINED)
        for option in schema.get("anyOf", ()):
            yield from _in_place(option)


def _can_end(schema: Any, finite: set[str]) -> bool:
    """Whether a schema matches a finite value that needs only the definitions in `finite`."""
    if isinstance(schema, bool):
        return schema
    if "$ref" in schema:
        return schema["$ref"].removeprefix(DEFINED) in finite
    if "anyOf" in schema:
        return any(_can_end(option, finite) for option in schema["anyOf"])
    needed: list[Any] = list(schema.get("prefixItems", ()))
    if schema.get("minItems", 0) > len(needed):
        needed.append(schema["items"])
    needed += [schema["properties"][name] for name in schema.get("required", ())]
    if least := schema.get("minProperties", 0):
        values = schema.get("properties") or schema.get("patternProperties")
        others = [schema["additionalProperties"]] if values is None else values.values()
        if sum(_can_end(each, finite) for each in others) < least:
            return False
    return all(_can_end(each, finite) for each in needed)
