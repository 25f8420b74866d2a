"""Collects log-probabilities as they arrive from the scheduler."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

# The token ids at one position and their log-probabilities. The actual token comes first.
LogprobRow = tuple[list[int], list[float]]


class PromptLogprobs:
    """Log-probabilities of a prompt. They may arrive in pieces, and more than once.

    A prompt's first token follows nothing, so it has no log-probabilities and its row is empty.
    """

    def __init__(self, prompt_len: int) -> None:
        """`prompt_len`: in tokens."""
        self._rows: list[LogprobRow | None] = [([], []), *[None] * (prompt_len - 1)]
        self._num_missing = prompt_len - 1

    @property
    def complete(self) -> bool:
        return not self._num_missing

    @property
    def rows(self) -> list[LogprobRow]:
        """One row per token of the prompt, without those that have not arrived."""
        return [row for row in self._rows if row is not None]

    def add(self, first: int, rows: Iterable[LogprobRow]) -> None:
        """Adds the rows of the tokens from `first` on."""
        for position, row in enumerate(rows, start=first):
            if self._rows[position] is None:
                self._rows[position] = row
                self._num_missing -= 1


class CompletionLogprobs:
    """Log-probabilities of a completion's tokens from number `first` on, in order, without those
    that have been forgotten."""

    def __init__(self, first: int) -> None:
        self._first = first
        self._rows: list[LogprobRow] = []

    def add(self, first: int, rows: Sequence[LogprobRow]) -> None:
        """Adds the rows of the tokens from `first` on, without those that arrived before."""
        known = self._first + len(self._rows)
        if first <= known:  # else some are missing, and these would be out of place
            self._rows += rows[known - first :]

    def of(self, offset: int, count: int) -> list[LogprobRow]:
        """The rows of `count` tokens from number `offset` on, or fewer if some have not arrived."""
        start = offset - self._first
        return self._rows[start : start + count]

    def forget(self, end: int) -> None:
        """Drops the rows of the tokens before number `end`, which will not be needed again."""
        count = max(end - self._first, 0)
        del self._rows[:count]
        self._first += count
