"""Log-probabilities as they come from the scheduler."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

# Of one position: token ids and their log-probabilities, the token that is there first.
LogprobRow = tuple[list[int], list[float]]


class PromptLogprobs:
    """Those of a prompt, in whatever pieces they come, and however often.

    A prompt's first token follows nothing, so that it has none: its row is empty.
    """

    def __init__(self, prompt_len: int) -> None:
        """`prompt_len`: tokens."""
        self._rows: list[LogprobRow | None] = [([], []), *[None] * (prompt_len - 1)]
        self._num_missing = prompt_len - 1

    @property
    def complete(self) -> bool:
        return not self._num_missing

    @property
    def rows(self) -> list[LogprobRow]:
        """One per token of the prompt, less those that have not come."""
        return [row for row in self._rows if row is not None]

    def add(self, first: int, rows: Iterable[LogprobRow]) -> None:
        """Takes those of the tokens from `first` on."""
        for position, row in enumerate(rows, start=first):
            if self._rows[position] is None:
                self._rows[position] = row
                self._num_missing -= 1


class CompletionLogprobs:
    """Those of a completion's tokens from number `first` on, in order."""

    def __init__(self, first: int) -> None:
        self._first = first
        self._rows: list[LogprobRow] = []

    def add(self, first: int, rows: Sequence[LogprobRow]) -> None:
        """Takes those of the tokens from `first` on, less those that came before."""
        known = self._first + len(self._rows)
        if first <= known:  # else some are missing, and so will these be
            self._rows += rows[known - first :]

    def of(self, offset: int, count: int) -> list[LogprobRow]:
        """Those of `count` tokens from number `offset` on; fewer where some have not come."""
        start = offset - self._first
        return self._rows[start : start + count]
