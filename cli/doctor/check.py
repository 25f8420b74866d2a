"""One line of what `doctor` finds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Check:
    """`wrong` keeps a stack from starting, a `warning` does not; `remedy` says what to do."""

    name: str
    state: Literal["ok", "warning", "wrong"]
    found: str
    remedy: str = ""
