"""Reads schemas of objects.

xgrammar gets an object in one of four forms, because it ignores some keywords in others: named
properties; named properties, and then further ones whose names match expressions; properties whose
names match expressions; properties with any name.
"""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from dataclasses import dataclass
from itertools import permutations
from typing import Any, Protocol
from urllib.parse import quote

from scheduler_svc.grammar.schema import keywords, numbers, strings
from scheduler_svc.grammar.schema.characters import intersection, single
from scheduler_svc.grammar.schema.document import Document, inside
from scheduler_svc.grammar.schema.errors import SchemaError
from scheduler_svc.grammar.schema.nodes import begins_with, to_json_text

_FURTHER = "additionalProperties", "unevaluatedProperties"
# An expression of `patternProperties` whose matches all begin with this character.
_BEGINNING = re.compile(r"\^([A-Za-z0-9_-])(?![*?{])[^|]*")


class Reader(Protocol):
    document: Document
    with_further: bool

    def read(self, schema: Any, place: str, depth: int) -> Any: ...


def read_object(reader: Reader, schema: dict[str, Any], place: str, depth: int) -> dict[str, Any]:
    """The form of a schema of objects that xgrammar enforces."""
    names = _Names.read(reader.document, schema, place)
    found = _Object(reader, schema, place, depth, names)
    named, patterns = found.mapping("properties"), found.mapping("patternProperties")
    keyword = next((each for each in _FURTHER if each in schema), None)
    further = schema[keyword] if keyword else None
    if names and names.listed is not None and not named and not patterns:
        values = True if further is None else further
        if keyword and isinstance(further, dict):  # read once, not for each name
            values = {"$ref": quote(inside(place, keyword), safe="#/~")}
        return found.named(dict.fromkeys(names.listed, values), {}, None)
    if named or ("properties" in schema and further is None and not patterns and not names):
        return found.named(named, patterns, further)
    return found.unnamed(patterns, further)


def distinct(form: dict[str, Any]) -> dict[str, Any]:
    """Adds what makes a form differ from others for xgrammar, which takes two forms for the same
    that only differ in a property or a key `title`, `default` or the like."""
    digest = hashlib.sha256(json.dumps(form, sort_keys=True).encode()).hexdigest()
    return {**form, "distinct": digest}


@dataclass(slots=True)
class _Names:
    """The names that `propertyNames` allows: those listed, or those that match the rest."""

    listed: list[str] | None
    pattern: str | None
    least: int | None
    most: int | None

    @classmethod
    def read(cls, document: Document, schema: dict[str, Any], place: str) -> _Names | None:
        place = inside(place, "propertyNames")
        names = document.resolve(schema.get("propertyNames", True), place)
        if isinstance(names, bool):
            return None if names else cls([], None, None, None)
        if not isinstance(names, dict):
            raise SchemaError("'propertyNames' must be a schema", place)
        for keyword in ("$ref", "anyOf", "oneOf", "allOf", *keywords.REJECTED):
            if keyword in names:
                raise SchemaError(f"{keyword!r} is not supported", place)
        pattern = names.get("pattern")
        least = numbers.count(names, "minLength", place)
        most = numbers.count(names, "maxLength", place)
        has_bounds = least is not None or most is not None
        values = [names["const"]] if "const" in names else names.get("enum")
        if (pattern is not None) + (values is not None) + has_bounds > 1:
            raise SchemaError("'pattern' beside other keywords is not supported", place)
        types = names.get("type", "string")
        if "string" not in (types if isinstance(types, list) else [types]):
            values = []
        if values is not None:
            if not isinstance(values, list):
                raise SchemaError("'enum' must be a list", place)
            return cls([each for each in values if isinstance(each, str)], None, None, None)
        if pattern is None and not has_bounds:
            return None
        return cls(None, pattern, least, most)

    def allow(self, name: str, place: str) -> bool:
        if self.listed is not None:
            return name in self.listed
        if self.pattern is not None:
            return _is_found(self.pattern, name, place)
        return (self.least or 0) <= len(name) and (self.most is None or len(name) <= self.most)

    def text(self, place: str) -> str:
        """The expression that they match, for xgrammar."""
        if self.pattern is not None:
            return to_json_text(strings.pattern(self.pattern, place))
        return to_json_text(strings.any_string(self.least, self.most))


@dataclass(slots=True)
class _Object:
    reader: Reader
    schema: dict[str, Any]
    place: str
    depth: int
    names: _Names | None

    def mapping(self, keyword: str) -> dict[str, Any]:
        value = self.schema.get(keyword, {})
        if not isinstance(value, dict):
            raise SchemaError(f"{keyword!r} must be an object", self.place)
        return value

    def named(
        self, named: dict[str, Any], patterns: dict[str, Any], further: Any
    ) -> dict[str, Any]:
        """Named properties, and those that match `patterns` or are `further` ones."""
        required = self._required(named)
        forms = self._forms(named, required)
        beside = self._beside(named, patterns)
        value = False if further is None else self._read(further, "additionalProperties")
        if value is not False and not patterns and not self.names and self.reader.with_further:
            beside = {strings.any_string_but(named): value}
        least, most = self._counts()
        if least is not None and least <= len(required):
            least = None
        if most is not None and most < len(required):
            raise SchemaError(
                "'maxProperties' is less than the number of required ones", self.place
            )
        if least is not None or most is not None:
            beside = {}
        if least is not None and least > len(forms):
            reason = "'minProperties' over the number of named properties is not supported"
            raise SchemaError(reason, self.place)
        if most is not None and most >= len(forms):
            most = None
        form = {"type": "object", "properties": forms, "required": required}
        if beside:
            form["patternProperties"] = beside
        return self._finished(form, least, most)

    def unnamed(self, patterns: dict[str, Any], further: Any) -> dict[str, Any]:
        """Properties that match `patterns` or `propertyNames`, or have any name."""
        self._required({})
        least, most = self._counts()
        if least is not None and least > 1:
            reason = f"'minProperties' {least} is not supported where a name may come twice"
            raise SchemaError(reason, self.place)
        values = self._read(True if further is None else further, "additionalProperties")
        if patterns and self.names:
            reason = "'propertyNames' beside 'patternProperties' is not supported"
            raise SchemaError(reason, self.place)
        if patterns:
            form = {"type": "object", "patternProperties": self._beside({}, patterns)}
            values = bool(form["patternProperties"])
            if not values:
                raise SchemaError(
                    "'patternProperties' with only false is not supported", self.place
                )
        else:
            if values in (True, {}) and not self.names and least is None and most is None:
                return {"type": "object"}
            form = {"type": "object", "additionalProperties": {} if values is True else values}
            if self.names and values is not False:
                text = self.names.text(inside(self.place, "propertyNames"))
                form = {"type": "object", "patternProperties": {text: values}}
        if (values is False or most == 0) and least is not None:
            raise SchemaError("'minProperties' excludes the only value", self.place)
        return self._finished(form, least, most)

    def _finished(
        self, form: dict[str, Any], least: int | None, most: int | None
    ) -> dict[str, Any]:
        form.setdefault("additionalProperties", False)
        if least is not None:
            form["minProperties"] = least
        if most is not None:
            form["maxProperties"] = most
        return distinct(form)

    def _forms(self, named: dict[str, Any], required: list[str]) -> dict[str, Any]:
        forms = {}
        for name, schema in named.items():
            if self.names and not self.names.allow(name, self.place):
                reason = f"'propertyNames' excludes the property {name[:50]!r}"
                raise SchemaError(reason, self.place)
            form = self._read(schema, "properties", name)
            if form is not False:
                forms[name] = form
            elif name in required:
                reason = f"no value matches the required property {name[:50]!r}"
                raise SchemaError(reason, self.place)
        return forms

    def _beside(self, named: dict[str, Any], patterns: dict[str, Any]) -> dict[str, Any]:
        """The properties that match `patterns`. Those of an expression that a named property
        matches are left out."""
        forms, kept = {}, {}
        for text, schema in patterns.items():
            node = strings.pattern(text, self.place)
            form = self._read(schema, "patternProperties", text)
            found = [name for name in named if _is_found(text, name, self.place)]
            for name in found:
                if form not in (True, {}) and not _are_same(schema, named[name]):
                    reason = (
                        f"'patternProperties' {text[:50]!r} beside the property {name[:50]!r} is "
                        "not supported"
                    )
                    raise SchemaError(reason, self.place)
            if form is not False and not found:
                forms[to_json_text(node)] = form
                kept[text] = node
        for one, other in permutations(patterns, 2):
            if one in kept and not _are_same(patterns[one], patterns[other]):
                beginning = _BEGINNING.fullmatch(other)
                if not beginning or intersection(
                    begins_with(kept[one]), single(ord(beginning[1])).maybe
                ):
                    reason = f"'patternProperties' {one[:50]!r} and {other[:50]!r} may overlap"
                    raise SchemaError(reason, self.place)
        return forms

    def _required(self, named: dict[str, Any]) -> list[str]:
        required = self.schema.get("required", [])
        if not isinstance(required, list) or not all(isinstance(each, str) for each in required):
            raise SchemaError("'required' must be a list of strings", self.place)
        for name in required:
            if name not in named:
                reason = f"'required' names {name[:50]!r}, which is none of its properties"
                raise SchemaError(reason, self.place)
        return [*dict.fromkeys(required)]

    def _counts(self) -> tuple[int | None, int | None]:
        least = numbers.count(self.schema, "minProperties", self.place)
        most = numbers.count(self.schema, "maxProperties", self.place)
        if least is not None and most is not None and least > most:
            raise SchemaError("'minProperties' is over 'maxProperties'", self.place)
        return least, most

    def _read(self, schema: Any, *names: str) -> Any:
        return self.reader.read(schema, inside(self.place, *names), self.depth + 1)


def _are_same(one: Any, other: Any) -> bool:
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def _is_found(pattern: Any, name: str, place: str) -> bool:
    """Whether a `pattern` matches some part of a name."""
    strings.pattern(pattern, place)  # its error is the better one
    try:
        with warnings.catch_warnings(action="ignore"):
            return bool(re.search(pattern, name))
    except re.error as error:
        raise SchemaError(f"'pattern' {pattern[:50]!r}: {error}", place) from error
