"""A request as the frontend holds it: checked, tokenized, with every default filled in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a completion is made and where it ends."""

    temperature: float  # 0 is greedy
    seed: int
    max_tokens: int
    eos_token_ids: tuple[int, ...]  # empty when the request ignores them
    stop_token_ids: tuple[int, ...]
    stop: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Request:
    """One completion to make; `deadline` is on the clock of `time.monotonic`."""

    request_id: str
    prompt_ids: Sequence[int]
    sampling: Sampling
    deadline: float | None
    priority: int = 0
    cache_salt: str = ""
