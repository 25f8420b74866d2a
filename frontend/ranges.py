"""What values a numeric field may have."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from shared.errors import InvalidArgumentError

_LARGEST = sys.float_info.max


@dataclass(frozen=True, slots=True)
class Range:
    """Finite numbers, closed; where `above`, `low` itself is outside."""

    low: float
    high: float = _LARGEST
    above: bool = False

    def __contains__(self, value: float) -> bool:  # NaN is in no range
        return (self.low < value if self.above else self.low <= value) and value <= self.high

    def __str__(self) -> str:
        if self.high == _LARGEST:
            return f"at least {self.low:g}"
        return f"in {'(' if self.above else '['}{self.low:g}, {self.high:g}]"


# Where a model's generation_config.json may set the default of requests that give no value.
DEFAULTED = {
    "temperature": Range(0, 2),
    "top_k": Range(0),
    "top_p": Range(0, 1, above=True),
    "min_p": Range(0, 1),
    "repetition_penalty": Range(1e-30, 1e30),  # beyond, what it makes of logits overflows
}


def check_range(field: str, value: float, valid: Range) -> None:
    """
    Raises:
        InvalidArgumentError: `value` is not in `valid`.
    """
    if value not in valid:
        raise InvalidArgumentError(field, f"{value} is out of range; must be {valid}")
