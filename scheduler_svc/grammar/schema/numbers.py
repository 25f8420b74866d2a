"""Bounds and multiples of numbers."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

from scheduler_svc.grammar.schema.errors import SchemaError

LARGEST_EXACT = 2**53  # the largest integer up to which doubles have no gaps
_LARGEST_INTEGER = 2**63 - 1  # that xgrammar reads
_LARGEST_COUNT = 2**31 - 1
_MAX_LISTED = 4096  # multiples between two bounds
_MAX_MULTIPLE = 1024  # of an integer without bounds; xgrammar ignores larger ones
_DECIMALS = 10**6  # xgrammar writes bounded numbers with at most six decimals
# From here on, doubles are less dense than these decimals, and may round to the bound.
_LARGEST_EXCLUSIVE = 2**32


def count(schema: dict[str, Any], keyword: str, place: str) -> int | None:
    """The number of a keyword such as `minItems`; None if it sets no limit."""
    if keyword not in schema:
        return None
    value = _finite(schema, keyword, place)
    if value < 0 or value != int(value):
        raise SchemaError(f"{keyword!r} must be a non-negative integer", place)
    if value > _LARGEST_COUNT:
        if keyword.startswith("min"):
            raise SchemaError(f"{keyword!r} over {_LARGEST_COUNT} is not supported", place)
        return None
    return int(value) or (None if keyword.startswith("min") else 0)


def integer(schema: dict[str, Any], place: str) -> dict[str, Any]:
    low, low_excluded = _bound(schema, "minimum", "exclusiveMinimum", max, place)
    high, high_excluded = _bound(schema, "maximum", "exclusiveMaximum", min, place)
    least = None if low is None else math.floor(low) + 1 if low_excluded else math.ceil(low)
    most = None if high is None else math.ceil(high) - 1 if high_excluded else math.floor(high)
    if least is not None and least < -_LARGEST_INTEGER:
        least = -_LARGEST_INTEGER
    if most is not None and most > _LARGEST_INTEGER:
        most = _LARGEST_INTEGER
    if least is not None and most is not None and least > most:
        raise SchemaError(f"Invalid range: no integer is from {low} to {high}", place)
    step = _step(schema, place)
    if step > 1:
        return _multiples(step, least, most, place)
    if (least or 0) > _LARGEST_INTEGER or (most or 0) < -_LARGEST_INTEGER:
        raise SchemaError("a bound is too large", place)
    return _bounded("integer", least, most)


def number(schema: dict[str, Any], place: str) -> dict[str, Any]:
    if "multipleOf" in schema:
        if Fraction(_finite(schema, "multipleOf", place)).denominator != 1:
            raise SchemaError("'multipleOf' a fraction is not supported", place)
        return integer(schema, place)
    low, low_excluded = _bound(schema, "minimum", "exclusiveMinimum", max, place)
    high, high_excluded = _bound(schema, "maximum", "exclusiveMaximum", min, place)
    if low is not None and abs(low) > _LARGEST_EXCLUSIVE:
        low, low_excluded = math.floor(low) + 1 if low_excluded else low, False
        low = max(low, -LARGEST_EXACT)
    if high is not None and abs(high) > _LARGEST_EXCLUSIVE:
        high, high_excluded = math.ceil(high) - 1 if high_excluded else high, False
        high = min(high, LARGEST_EXACT)
    if (low or 0) > LARGEST_EXACT or (high or 0) < -LARGEST_EXACT:
        raise SchemaError("a bound is too large", place)
    if low is not None and high is not None:
        first, last = _decimal(low), _decimal(high)
        least = math.floor(first) + 1 if low_excluded else math.ceil(first)
        most = math.ceil(last) - 1 if high_excluded else math.floor(last)
        if least > most:
            reason = f"Invalid range: no number with six decimals is from {low} to {high}"
            raise SchemaError(reason, place)
    return _bounded("number", low, high, low_excluded, high_excluded)


def _bounded(
    name: str, low: Any, high: Any, low_excluded: bool = False, high_excluded: bool = False
) -> dict[str, Any]:
    bounds = {
        "exclusiveMinimum" if low_excluded else "minimum": low,
        "exclusiveMaximum" if high_excluded else "maximum": high,
    }
    return {"type": name} | {key: bound for key, bound in bounds.items() if bound is not None}


def _multiples(step: int, least: int | None, most: int | None, place: str) -> dict[str, Any]:
    if least is None and most is None:
        if step > _MAX_MULTIPLE:
            raise SchemaError(f"'multipleOf' over {_MAX_MULTIPLE} is not supported", place)
        return {"type": "integer", "multipleOf": step}
    if least is None or most is None:
        raise SchemaError("'multipleOf' beside a single bound is not supported", place)
    listed = range(-(-least // step) * step, most + 1, step)
    if not listed:
        raise SchemaError(f"Invalid range: no multiple is from {least} to {most}", place)
    if len(listed) > _MAX_LISTED:
        reason = f"'multipleOf' beside bounds with over {_MAX_LISTED} multiples is not supported"
        raise SchemaError(reason, place)
    return {"enum": [*listed]}


def _step(schema: dict[str, Any], place: str) -> int:
    """Integers are multiples of a fraction if they are multiples of its numerator."""
    if "multipleOf" not in schema:
        return 1
    value = _finite(schema, "multipleOf", place)
    if value <= 0:
        raise SchemaError("'multipleOf' must be over 0", place)
    return Fraction(value).numerator


def _bound(
    schema: dict[str, Any], keyword: str, exclusive: str, stricter: Any, place: str
) -> tuple[Any, bool]:
    """The stricter of two bounds, and whether it is excluded itself."""
    bounds = [_finite(schema, each, place) for each in (keyword, exclusive) if each in schema]
    if not bounds:
        return None, False
    bound = stricter(bounds)
    return bound, exclusive in schema and schema[exclusive] == bound


def _finite(schema: dict[str, Any], keyword: str, place: str) -> Any:
    value = schema[keyword]
    if not _is_number(value) or (isinstance(value, float) and not math.isfinite(value)):
        raise SchemaError(f"{keyword!r} must be a number", place)
    return value


def _decimal(value: float) -> Fraction:
    """A number in units of the last decimal."""
    return Fraction(repr(value)) * _DECIMALS


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
