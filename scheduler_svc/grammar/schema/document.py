"""Finds the parts of a JSON schema that a `$ref` names."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import unquote

from scheduler_svc.grammar.schema.errors import SchemaError

_DRAFT_3, _DRAFT_4 = "/draft-03/", "/draft-04/"
_OLDER = (_DRAFT_4, "/draft-06/", "/draft-07/", "/draft/2019-09/")
_MAX_SHOWN = 50  # characters of a reference
_INDEX = re.compile(r"0|[1-9][0-9]{0,8}")


class Document:
    """A JSON schema from its root, and the draft that it is written for.

    `has_tuples` is whether `items` may be a list, as it may in drafts before 2020-12, which do not
    have `prefixItems`.
    """

    def __init__(self, root: Any) -> None:
        self.root = root
        draft = str(root.get("$schema", "")) if isinstance(root, dict) else ""
        if _DRAFT_3 in draft:
            raise SchemaError(f"'$schema' {draft[:_MAX_SHOWN]!r} is not supported", "#")
        self.has_tuples = any(each in draft for each in _OLDER)
        self._id = "id" if _DRAFT_4 in draft else "$id"

    def changes_base(self, schema: dict[str, Any], place: str) -> bool:
        """Whether the references in a schema do not start from the root."""
        base = schema.get(self._id)
        return place != "#" and isinstance(base, str) and not base.startswith("#")

    def find(self, reference: Any, place: str) -> tuple[Any, str]:
        """The schema that a reference at `place` names, and its place.

        Raises:
            SchemaError: it names nothing, or something outside.
        """
        if not isinstance(reference, str):
            raise SchemaError("'$ref' must be a string", place)
        shown = repr(reference[:_MAX_SHOWN])
        if reference != "#" and not reference.startswith("#/"):
            reason = f"'$ref' to {shown} is not supported, only to a part of itself"
            raise SchemaError(reason, place)
        found, where = self.root, "#"
        for part in unquote(reference).split("/")[1:]:
            if isinstance(found, dict) and self.changes_base(found, where):
                raise SchemaError(f"'$ref' to {shown} leads into a schema with an '$id'", place)
            name = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict) and name in found:
                found = found[name]
            elif isinstance(found, list) and _INDEX.fullmatch(name) and int(name) < len(found):
                found = found[int(name)]
            else:
                reason = f"Cannot find field {name[:_MAX_SHOWN]!r} of '$ref' {shown}"
                raise SchemaError(reason, place)
            where = inside(where, name)
        return found, where

    def resolve(self, schema: Any, place: str) -> Any:
        """Follows `$ref`, and `allOf` with a single schema, to a schema that has neither."""
        seen: set[int] = set()
        while isinstance(schema, dict) and id(schema) not in seen:
            seen.add(id(schema))
            if "$ref" in schema:
                schema, _ = self.find(schema["$ref"], place)
            elif isinstance(schema.get("allOf"), list) and len(schema["allOf"]) == 1:
                schema = schema["allOf"][0]
            else:
                break
        return schema


def inside(place: str, *names: object) -> str:
    """The place of a part, as a JSON pointer."""
    return "/".join([place, *(str(each).replace("~", "~0").replace("/", "~1") for each in names)])
