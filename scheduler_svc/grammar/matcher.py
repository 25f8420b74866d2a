"""Structured output: finds the tokens that may come next if a completion is to match a grammar.

xgrammar does the matching. Only the grammar host and its forks import this.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from xgrammar import CompiledGrammar as XGrammar
from xgrammar import GrammarMatcher

from scheduler_svc.core.sampling import GrammarKind
from scheduler_svc.grammar.errors import GrammarError


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A grammar over a vocabulary."""

    kind: GrammarKind
    xgrammar: XGrammar

    @property
    def vocab_size(self) -> int:
        return int(self.xgrammar.tokenizer_info.vocab_size)


class Matcher:
    """Tracks how far a completion has come in its grammar, which depends on its tokens alone.

    `finished` becomes true with an end token or, if there are no end tokens, once the grammar is
    complete and nothing more can follow. End tokens may come only once the grammar is complete,
    even where it would allow the text that they spell.
    """

    __slots__ = ("_has_ends", "_kind", "_num_tokens", "_vocab_size", "_xgrammar", "finished")

    def __init__(
        self,
        compiled: CompiledGrammar,
        end_token_ids: Iterable[int],
        generated_ids: Iterable[int] = (),
    ) -> None:
        """
        Raises:
            GrammarError: the grammar does not allow `generated_ids`.
        """
        self._kind, self._vocab_size = compiled.kind, compiled.vocab_size
        ends = [i for i in sorted(end_token_ids) if 0 <= i < self._vocab_size]
        self._xgrammar = GrammarMatcher(compiled.xgrammar, override_stop_tokens=ends or None)
        self._num_tokens = 0
        self._has_ends = bool(ends)
        self.finished = self._is_finished()
        for token in generated_ids:
            self.accept(token)

    def accept(self, token: int) -> None:
        """Advances by one token.

        Raises:
            GrammarError: the grammar does not allow it here.
        """
        if self.finished or not self._xgrammar.accept_token(token):
            raise GrammarError(
                self._kind,
                f"token {token} at index {self._num_tokens} of the completion does not match",
            )
        self._num_tokens += 1
        self.finished = self._is_finished()

    def mask(self) -> bytes:
        """The tokens that may come next: uint32[ceil(vocab / 32)], lowest bit first. Not for a
        finished matcher.

        Raises:
            GrammarError: none may.
        """
        mask = self._fill().tobytes()
        if mask == bytes(len(mask)):  # a tenth of the time that `any` takes
            reason = f"after {self._num_tokens} tokens of the completion none can follow"
            raise GrammarError(self._kind, reason)
        return mask

    def _is_finished(self) -> bool:
        if self._has_ends:
            return bool(self._xgrammar.is_terminated())
        return self._xgrammar.is_completed() and not self._fill().any()

    def _fill(self) -> npt.NDArray[np.int32]:
        row = np.zeros((1, -(-self._vocab_size // 32)), np.int32)
        self._xgrammar.fill_next_token_bitmask(row)
        if padding := -self._vocab_size % 32:  # xgrammar sets the bits there
            row[0, -1] &= np.int32((1 << (32 - padding)) - 1)
        return row
