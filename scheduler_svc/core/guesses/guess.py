"""A guess at the next tokens of one sequence."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from itertools import takewhile
from math import log1p

from scheduler_svc.core.guesses.acceptance import FORCED, Acceptance
from scheduler_svc.core.guesses.draft_index import MAX_MATCH, DraftIndex

MAX_DRAFTS = 16  # of one sequence in a step
DRAFTED = -(2**31)  # stands for a token that the workers' draft model guesses
_MIN_LIKELY = 0.1  # less likely tokens are not worth a calculation


class Guess:
    """A guess at the tokens after `sequence`, which others extend. It learns whether it was right
    from the tokens that come, drafted or not. The guess `by_model` is `DRAFTED` for every token,
    until the workers have answered what their model guessed.
    """

    __slots__ = (
        "_acceptance",
        "_index",
        "_match_lens",
        "_num_known",
        "_sequence",
        "tokens",
    )

    def __init__(
        self, sequence: array[int], acceptance: Acceptance, *, by_model: bool = False
    ) -> None:
        self._sequence = sequence
        self._num_known = 0  # tokens of the sequence that the guess follows
        self._index = None if by_model else DraftIndex(sequence)
        self._acceptance = acceptance
        self.tokens: Seq[int] = ()
        self._match_lens: list[int] = []  # for each token, as `Acceptance` defines it

    @property
    def is_current(self) -> bool:
        """Whether the guess follows the last token of the sequence."""
        return self._num_known == len(self._sequence)

    def renew(self) -> None:
        """Learns from the sequence's new tokens, and guesses the tokens after them."""
        if self.is_current:
            return
        new = self._sequence[self._num_known : self._num_known + len(self.tokens)]
        for guessed, match_len, token in zip(self.tokens, self._match_lens, new, strict=False):
            if guessed != DRAFTED:  # else the model was not asked
                self._acceptance.learn(match_len, right=guessed == token)
            if guessed != token:
                break
        self._num_known = len(self._sequence)
        if self._index is None:
            self.tokens, first_len = [DRAFTED] * MAX_DRAFTS, 0
        else:
            self.tokens, first_len = self._index.propose(MAX_DRAFTS)
        last_len = first_len + len(self.tokens)
        self._match_lens = [min(each, MAX_MATCH) for each in range(first_len, last_len)]

    def constrain(self, tokens: Seq[int]) -> None:
        """Replaces the guess by tokens of which the first may be the guess's, and the others are
        forced by a grammar."""
        pairs = zip(self.tokens, tokens, strict=False)
        num_guessed = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        forced = [FORCED] * (len(tokens) - num_guessed)
        self.tokens, self._match_lens = tokens, [*self._match_lens[:num_guessed], *forced]

    def gains(self, num_sampled: int, max_tokens: int) -> Iterator[float]:
        """The gain of each drafted token as `Speculation` defines it, in their order.

        Args:
            num_sampled: tokens that a step in flight samples. They are guessed, but not drafted.
            max_tokens: that may be guessed.
        """
        expected, likely = 1.0, 1.0
        for i, match_len in enumerate(self._match_lens[:max_tokens]):
            likely *= self._acceptance.probability(match_len)
            if i < num_sampled:
                continue
            if likely < _MIN_LIKELY:
                return
            yield log1p(likely / expected)
            expected += likely
