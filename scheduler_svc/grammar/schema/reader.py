"""Reads JSON schemas, and writes them in the form that xgrammar enforces in full.

A completion that does not match its schema is worse than an error. xgrammar ignores keywords that
it does not know, and many that it cannot combine. So this reads a schema from its root to all
places where a `$ref` leads, and rejects what would not be enforced. The form for xgrammar has only
keywords that it enforces, and no annotations. It is stricter than the schema in these points:

- Properties and items that a schema does not name are left out beside others, unless
  `additionalProperties` allows them. Properties come in the schema's order.
- A `pattern` matches the whole string. Patterns, bounds of the length, and names of further
  properties leave out characters that JSON escapes.
- Numbers with bounds have at most six decimals and no exponent.

`format` is an annotation beside `pattern` and in `propertyNames`, as it is in JSON Schema.
"""

from __future__ import annotations

import json
from itertools import product
from typing import Any

from scheduler_svc.grammar.schema import keywords, numbers, strings
from scheduler_svc.grammar.schema.document import Document, inside
from scheduler_svc.grammar.schema.errors import SchemaError
from scheduler_svc.grammar.schema.finite import DEFINED, check_finite
from scheduler_svc.grammar.schema.objects import distinct, read_object
from scheduler_svc.grammar.schema.unions import Union, is_of_type, separate, types_of

MAX_DEPTH = 64  # of nested schemas; deeper ones take disproportionately long to compile
_TOO_DEEP = f"is nested more than {MAX_DEPTH} deep"


def enforced_text(text: str) -> str:
    """The form of a schema for xgrammar.

    Raises:
        SchemaError: a part of the schema cannot be enforced.
    """
    try:
        schema = json.loads(text, parse_constant=_reject_constant)
    except ValueError as error:
        raise SchemaError(f"is not JSON: {error}", "#") from error
    except RecursionError as error:
        raise SchemaError(_TOO_DEEP, "#") from error
    return json.dumps(enforced(schema))


def enforced(schema: Any, *, with_further: bool = True) -> Any:
    """The form of a parsed schema for xgrammar; see `enforced_text`.

    Args:
        with_further: whether an object may have further properties beside named ones where its
            schema says so.
    """
    try:
        return Reader(schema, with_further).read_all()
    except RecursionError as error:
        raise SchemaError(_TOO_DEEP, "#") from error


def _reject_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


class Reader:
    """Reads one document.

    `_definitions` are the forms of the schemas where references lead. They are read after the
    schemas that refer to them.
    """

    def __init__(self, root: Any, with_further: bool) -> None:
        self.document = Document(root)
        self.with_further = with_further
        self._definitions: dict[str, Any] = {}
        self._names: dict[str, str] = {}  # of definitions, by their places
        self._waiting: list[tuple[Any, str]] = []
        self._unions: list[Union] = []
        self._bases: list[str] = []  # places of schemas whose references do not start from the root
        self._referring: list[str] = []  # places of references

    def read_all(self) -> Any:
        form = self.read(self.document.root, "#")
        while self._waiting:
            schema, place = self._waiting.pop()
            self._definitions[self._names[place]] = self.read(schema, place)
        for base, place in product(self._bases, self._referring):
            if place == base or place.startswith(f"{base}/"):
                raise SchemaError("'$ref' inside a schema with an '$id' is not supported", place)
        places = {name: place for place, name in self._names.items()}
        check_finite({**self._definitions, "": form}, {**places, "": "#"})
        for union in self._unions:
            separate(union, self.document, self._target)
        return {**form, "$defs": self._definitions} if self._definitions else form

    def read(self, schema: Any, place: str, depth: int = 0) -> Any:
        """The form of a schema; False if no value matches."""
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            shown = json.dumps(schema)[:50]
            raise SchemaError(f"Schema should be an object or bool, but got {shown}", place)
        if depth > MAX_DEPTH:
            raise SchemaError(_TOO_DEEP, place)
        for keyword in keywords.REJECTED:
            if keyword in schema:
                raise SchemaError(f"{keyword!r} is not supported", place)
        if schema.get("uniqueItems"):
            raise SchemaError("'uniqueItems' is not supported", place)
        if self.document.changes_base(schema, place):
            self._bases.append(place)
        if "type" in schema:
            _check_types(schema["type"], place)
        head = next((keyword for keyword in keywords.HEADS if keyword in schema), None)
        if head is None:
            return self._of_types(schema, place, depth)
        for keyword in (*keywords.HEADS, *keywords.ASSERTIONS):
            if keyword in schema and keyword not in (head, "type"):
                raise SchemaError(f"{keyword!r} beside {head!r} is not supported", place)
        form = self._of_head(schema, head, place, depth)
        if "type" in schema and not self._says_nothing_new(schema, head, place):
            raise SchemaError(f"'type' beside {head!r} is not supported", place)
        return form

    def _of_head(self, schema: dict[str, Any], head: str, place: str, depth: int) -> Any:
        value = schema[head]
        if head == "$ref":
            return self._reference(value, place)
        if head == "const":
            return _values("const", [value], place)
        if not isinstance(value, list) or not value:
            reason = "must not be empty" if value == [] else "must be a list"
            raise SchemaError(f"{head!r} {reason}", place)
        if head == "enum":
            return _values("enum", value, place)
        if head == "allOf":
            needed = [index for index, each in enumerate(value) if not _is_annotation(each)]
            if len(needed) > 1:
                raise SchemaError("'allOf' of more than one schema is not supported", place)
            index = (*needed, 0)[0]
            return self.read(value[index], inside(place, head, index), depth + 1)
        forms = [
            self.read(each, inside(place, head, index), depth + 1)
            for index, each in enumerate(value)
        ]
        possible = [index for index, form in enumerate(forms) if form is not False]
        if not possible:
            return False
        forms = [{} if forms[index] is True else forms[index] for index in possible]
        if head == "oneOf":
            self._unions.append(Union([value[index] for index in possible], forms, place))
        return {"anyOf": forms}

    def _says_nothing_new(self, schema: dict[str, Any], head: str, place: str) -> bool:
        """Whether a schema's type is that of all values of its other keyword anyway."""
        if head == "$ref":
            return False
        rest = {head: schema[head]}
        found = types_of(self.document, rest, place, _read_untyped)
        types = {schema["type"]} if isinstance(schema["type"], str) else {*schema["type"]}
        return found is not None and all(is_of_type(each, types) for each in found)

    def _reference(self, reference: Any, place: str) -> Any:
        self._referring.append(place)
        schema, where = self.document.find(reference, place)
        if isinstance(schema, bool):
            return schema
        if where not in self._names:
            self._names[where] = str(len(self._names))
            self._waiting.append((schema, where))
        return {"$ref": DEFINED + self._names[where]}

    def _target(self, form: Any) -> Any:
        while isinstance(form, dict) and "$ref" in form:
            form = self._definitions[form["$ref"].removeprefix(DEFINED)]
        return form if isinstance(form, dict) else {}

    def _of_types(self, schema: dict[str, Any], place: str, depth: int) -> Any:
        if "type" not in schema:
            types = [*_read_untyped(schema)]
            read = {"object": keywords.OBJECT, "array": keywords.ARRAY}
            for keyword in keywords.ASSERTIONS:
                if keyword in schema and not any(keyword in read[each] for each in types):
                    raise SchemaError(f"{keyword!r} without 'type' is not supported", place)
            if not types:
                return True
        else:
            types = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
        forms = [self._of_type(each, schema, place, depth) for each in dict.fromkeys(types)]
        return forms[0] if len(forms) == 1 else {"anyOf": forms}

    def _of_type(self, name: str, schema: dict[str, Any], place: str, depth: int) -> dict[str, Any]:
        match name:
            case "string":
                return strings.read_string(schema, place)
            case "integer":
                return numbers.integer(schema, place)
            case "number":
                return numbers.number(schema, place)
            case "array":
                return self._array(schema, place, depth)
            case "object":
                return read_object(self, schema, place, depth)
            case _:
                return {"type": name}

    def _array(self, schema: dict[str, Any], place: str, depth: int) -> dict[str, Any]:
        least = numbers.count(schema, "minItems", place)
        most = numbers.count(schema, "maxItems", place)
        if least is not None and most is not None and least > most:
            raise SchemaError("'minItems' is over 'maxItems'", place)
        first, further, keyword = self._items(schema, place)
        forms = []
        for index, each in enumerate(first):
            form = self.read(each, inside(place, keyword, index), depth + 1)
            if form is False and (most is None or index < most):
                raise SchemaError(f"no value matches item {index}", place)
            forms.append({} if form is True else form)
        if further is None:
            further = not forms or (least or 0) > len(forms)
        rest = self.read(further, inside(place, "items"), depth + 1)
        if most is not None and most <= len(forms):
            forms, rest = forms[:most], False
        if rest is False and (least or 0) > len(forms):
            raise SchemaError(f"'minItems' is over {len(forms)}, the number of items", place)
        if not forms and rest in (True, {}) and least is None and most is None:
            return {"type": "array"}
        form = {"type": "array", "items": {} if rest is True else rest}
        if forms:
            form["prefixItems"] = forms
        bounds = {"minItems": least, "maxItems": most if rest is not False else None}
        return form | {key: each for key, each in bounds.items() if each is not None}

    def _items(self, schema: dict[str, Any], place: str) -> tuple[list[Any], Any, str]:
        """The schemas of the first items, that of further ones, and the first ones' keyword."""
        keyword = "prefixItems"
        further = schema.get("items", schema.get("unevaluatedItems"))
        if self.document.has_tuples:
            if "prefixItems" in schema and "items" in schema:
                reason = "'prefixItems' beside 'items' before draft 2020-12 is not supported"
                raise SchemaError(reason, place)
            if isinstance(schema.get("items"), list):
                keyword = "items"
                further = schema.get("additionalItems", schema.get("unevaluatedItems"))
        first = schema.get(keyword, [])
        if not isinstance(first, list) or (keyword == "prefixItems" and isinstance(further, list)):
            raise SchemaError(f"{keyword!r} must be a list, and 'items' a schema", place)
        return first, further, keyword


def _is_annotation(schema: Any) -> bool:
    """Whether all values match a schema, because it has no keyword that says otherwise."""
    asserting = {*keywords.HEADS, *keywords.ASSERTIONS, *keywords.REJECTED, "uniqueItems"}
    return schema is True or (isinstance(schema, dict) and asserting.isdisjoint(schema))


def _check_types(types: Any, place: str) -> None:
    listed = [types] if isinstance(types, str) else types
    if not isinstance(listed, list) or not all(isinstance(each, str) for each in listed):
        raise SchemaError("Type should be a string, or a list of strings: 'type'", place)
    if not listed:
        raise SchemaError("'type' must not be empty", place)
    for each in listed:
        if each not in keywords.TYPES:
            raise SchemaError(f'Unsupported type "{each[:50]}"', place)


def _read_untyped(schema: dict[str, Any]) -> set[str]:
    """The type as which a schema without `type` is read, because its keywords make that clear."""
    if any(each in schema for each in ("properties", "additionalProperties", "patternProperties")):
        return {"object"}
    return {"array"} if "items" in schema or "prefixItems" in schema else set()


def _values(keyword: str, values: list[Any], place: str) -> dict[str, Any]:
    for value in values:
        _check_value(value, keyword, place)
    return distinct({"enum": values})


def _check_value(value: Any, keyword: str, place: str) -> None:
    if isinstance(value, int) and abs(value) > numbers.LARGEST_EXACT:
        raise SchemaError(f"{keyword!r} has {str(value)[:50]}, which is over 2^53", place)
    if isinstance(value, float) and value - value:  # infinite
        raise SchemaError(f"{keyword!r} has {value}, which is no number of JSON", place)
    for each in (
        value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    ):
        _check_value(each, keyword, place)
