"""Guesses a sequence's next tokens from its own earlier tokens.

This is prompt lookup (https://github.com/apoorvumang/prompt-lookup-decoding). The last tokens are
searched for at earlier positions, and the tokens after the longest match are the draft. As in LZ77,
positions with equal tokens are chained, and the search follows the newest of them. It first tries
the place where the last match continues, even if it is far back.

On recorded completions, neither longer keys nor a suffix tree nor earlier completions of the same
client were faster by 5 %.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import NamedTuple

MAX_MATCH = 16  # tokens compared; longer matches are hardly better
_MAX_EARLIER = 8  # occurrences of the last token; 64 gained nothing
_MAX_INDEXED = 2048  # tokens per call, about 0.5 ms


class Draft(NamedTuple):
    """Guessed tokens.

    Args:
        tokens: in order; may be empty.
        match_len: the number of last tokens that equal those before the draft's source, at most
            `MAX_MATCH`; 0 without tokens.
    """

    tokens: list[int]
    match_len: int


class DraftIndex:
    """Where each token of one sequence occurred before.

    Args:
        tokens: int32[prompt + generated] of the sequence, to which its owner only appends.
    """

    __slots__ = ("_earlier", "_lag", "_newest", "_tokens")

    def __init__(self, tokens: array[int]) -> None:
        self._tokens = tokens
        self._newest: dict[int, int] = {}  # by token, the end of its newest indexed occurrence
        self._earlier = array("i")  # by position, the end of the token's occurrence before; 0: none
        self._lag = 0  # from the source of the last draft to the sequence's end; 0: none yet

    def propose(self, max_tokens: int) -> Draft:
        """Indexes tokens that were appended since the last call, and guesses the next
        `max_tokens`. If many were appended, only a part is indexed, and the draft is empty."""
        if not self._catch_up() or max_tokens <= 0:
            return Draft([], 0)
        match_len, lag = self._longest_match()
        if not match_len:
            return Draft([], 0)
        self._lag = lag
        start = len(self._tokens) - lag
        tokens = self._tokens[start : start + max_tokens].tolist()
        if lag < max_tokens:  # the draft is longer than its source, and repeats it
            tokens = (tokens * -(-max_tokens // lag))[:max_tokens]
        return Draft(tokens, match_len)

    def _catch_up(self) -> bool:
        """Indexes the next tokens. Returns whether all are indexed now."""
        newest, start = self._newest, len(self._earlier)
        find, append = newest.get, self._earlier.append
        for end, token in enumerate(self._tokens[start : start + _MAX_INDEXED], start + 1):
            append(find(token, 0))
            newest[token] = end
        return len(self._earlier) == len(self._tokens)

    def _longest_match(self) -> tuple[int, int]:
        """The length of the longest match that is found, and the lag from its end to the
        sequence's. Of equally long ones, the first candidate wins."""
        tokens, last = self._tokens, len(self._tokens) - 1
        longest, lag = 0, 0
        for end in self._candidates():
            # Most candidates differ in the token that would make them longer than the longest.
            if end <= longest or tokens[end - 1 - longest] != tokens[last - longest]:
                continue
            limit, length = min(end, MAX_MATCH), 0
            while length < limit and tokens[end - 1 - length] == tokens[last - length]:
                length += 1
            if length > longest:
                longest, lag = length, last + 1 - end
            if longest == MAX_MATCH:
                break
        return longest, lag

    def _candidates(self) -> Iterator[int]:
        """The ends of earlier tokens that may equal the last ones."""
        length = len(self._tokens)
        if self._lag:
            yield length - self._lag
        end = length
        for _ in range(_MAX_EARLIER):
            end = self._earlier[end - 1] if end else 0
            if not end:
                return
            yield end
