"""A finding of `doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Check:
    """A finding: `wrong` keeps a stack from starting, `warning` does not; `remedy` fixes it."""

    name: str
    state: Literal["ok", "warning", "wrong"]
    found: str
    remedy: str = ""
