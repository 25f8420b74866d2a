"""The client that a request came from, as its frontend knows it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Client:
    """A client's name, share of the machine, and token budgets. A budget of 0 means no limit."""

    name: str = ""  # empty: anonymous
    weight: float = 1.0
    input_tokens_per_minute: int = 0
    output_tokens_per_minute: int = 0


ANONYMOUS = Client()
