"""The probability that a drafted token is accepted, learned from all guesses, drafted or not."""

from __future__ import annotations

FORCED = 99  # the evidence of a token that a grammar forces
_MAX_MATCH = 8  # longer matches count as this long
_PRIOR = 0.5  # before the first guess
_PRIOR_WEIGHT = 4.0  # guesses
_DECAY = 0.95  # of older guesses, per guess


class Acceptance:
    """The acceptance of guesses by the length of the match that they follow. Where there are few
    guesses, that of `prior` counts."""

    def __init__(self, prior: Acceptance | None = None) -> None:
        self._prior = prior
        self._guesses = [0.0] * (_MAX_MATCH + 2)
        self._hits = [0.0] * (_MAX_MATCH + 2)

    def probability(self, match_len: int) -> float:
        """The probability that a guess after a match of this many tokens is right."""
        size = min(match_len, _MAX_MATCH + (match_len == FORCED))
        prior = self._prior.probability(match_len) if self._prior else _PRIOR
        hits = self._hits[size] + _PRIOR_WEIGHT * prior
        return hits / (self._guesses[size] + _PRIOR_WEIGHT)

    def learn(self, match_len: int, *, right: bool) -> None:
        """Notes whether a guess was right."""
        size = min(match_len, _MAX_MATCH + (match_len == FORCED))
        self._guesses[size] = self._guesses[size] * _DECAY + 1
        self._hits[size] = self._hits[size] * _DECAY + right
        if self._prior:
            self._prior.learn(match_len, right=right)
