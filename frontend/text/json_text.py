"""Parses the JSON texts within requests."""

from __future__ import annotations

import json
from typing import Any

from shared.errors import InvalidArgumentError


def parse_json(field: str, text: str) -> Any:
    """Parses `text`, which is the request's `field`.

    Raises:
        InvalidArgumentError: the text is not JSON, or Python cannot hold its value.
    """

    def reject_constant(name: str) -> None:
        raise InvalidArgumentError(field, f"not JSON: {name} is not a JSON value")

    try:
        return json.loads(text, parse_constant=reject_constant)
    except json.JSONDecodeError as error:
        raise InvalidArgumentError(
            field, f"not JSON: {error.msg} at line {error.lineno} column {error.colno}"
        ) from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; deep nesting
        raise InvalidArgumentError(
            field, "not readable: nests too deep, or a number is too long"
        ) from error
