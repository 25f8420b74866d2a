"""The error about a JSON schema, with the place in it."""

from __future__ import annotations

_MAX_PLACE = 100  # characters


class SchemaError(Exception):
    """A schema cannot be enforced. The message says which part, and where it is."""

    def __init__(self, reason: str, place: str) -> None:
        if len(place) > _MAX_PLACE:
            place = f"{place[: _MAX_PLACE // 2]}…{place[-_MAX_PLACE // 2 :]}"
        super().__init__(f"{reason} (at {place})")
