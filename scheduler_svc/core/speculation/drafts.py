"""Drafts of a sequence's next tokens, from earlier occurrences of its last tokens."""

from __future__ import annotations

from array import array
from typing import NamedTuple

_N = 3


class Draft(NamedTuple):
    tokens: list[int]
    match_len: int


class DraftIndex:
    def __init__(self, tokens: array[int]) -> None:
        self._tokens = tokens
        self._ends: dict[tuple[int, ...], int] = {}
        self._indexed = _N

    def propose(self, max_tokens: int) -> Draft:
        tokens = self._tokens
        for end in range(self._indexed, len(tokens)):
            self._ends[tuple(tokens[end - _N : end])] = end
        self._indexed = max(len(tokens), _N)
        found = self._ends.get(tuple(tokens[-_N:]))
        if found is None:
            return Draft([], 0)
        return Draft(tokens[found : found + max_tokens].tolist(), _N)
