"""Structured output: finds the tokens that may come next if a completion is to match a grammar.

xgrammar does the matching. Importing it takes seconds and brings in torch, so `compiler` does that
on a thread, when the first grammar arrives.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from scheduler_svc.sampling import GrammarKind

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar as XGrammar

FILL_THREADS = 2

_FIELDS = {
    GrammarKind.JSON_SCHEMA: "json_schema",
    GrammarKind.REGEX: "regex",
    GrammarKind.EBNF: "grammar",
    GrammarKind.JSON: "json_object",
}


class GrammarError(Exception):
    """A grammar cannot be used, or does not allow a token. The message is for the client and names
    the field."""

    def __init__(self, kind: GrammarKind, reason: str) -> None:
        super().__init__(f"sampling.structured_output.{_FIELDS[kind]}: {reason}")


class GrammarsBusyError(Exception):
    """Too many grammars are being compiled; nothing is wrong with this one."""


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A grammar over a vocabulary, and the tokens that end a completion. These may come only once
    the grammar is complete, even where it would allow the text that they spell."""

    kind: GrammarKind
    end_token_ids: frozenset[int]
    xgrammar: XGrammar

    @property
    def vocab_size(self) -> int:
        return self.xgrammar.tokenizer_info.vocab_size


class Matcher:
    """Tracks how far a completion has come in its grammar, which depends on its tokens alone.

    `finished` becomes true with an end token or, if there are no end tokens, once the grammar is
    complete and nothing more can follow.
    """

    __slots__ = ("_has_ends", "compiled", "finished", "num_tokens", "xgrammar")

    def __init__(self, compiled: CompiledGrammar, generated_ids: Iterable[int] = ()) -> None:
        """
        Raises:
            GrammarError: the grammar does not allow `generated_ids`.
        """
        from xgrammar import GrammarMatcher

        ends = [i for i in sorted(compiled.end_token_ids) if 0 <= i < compiled.vocab_size]
        self.compiled = compiled
        self.xgrammar = GrammarMatcher(compiled.xgrammar, override_stop_tokens=ends or None)
        self.num_tokens = 0
        self._has_ends = bool(ends)
        self.finished = self._is_finished()
        for token in generated_ids:
            self.accept(token)

    def accept(self, token: int) -> None:
        """Advances by one token.

        Raises:
            GrammarError: the grammar does not allow it here.
        """
        if self.finished or not self.xgrammar.accept_token(token):
            raise GrammarError(
                self.compiled.kind,
                f"token {token} at index {self.num_tokens} of the completion does not match",
            )
        self.num_tokens += 1
        self.finished = self._is_finished()

    def mask(self) -> bytes:
        """The tokens that may come next: uint32[ceil(vocab / 32)], lowest bit first. Not for a
        finished matcher.

        Raises:
            GrammarError: none may.
        """
        (mask,) = fill_masks([self])
        if isinstance(mask, GrammarError):
            raise mask
        return mask

    def _is_finished(self) -> bool:
        if self._has_ends:
            return self.xgrammar.is_terminated()
        return self.xgrammar.is_completed() and not _fill([self]).any()


def fill_masks(matchers: Seq[Matcher]) -> list[bytes | GrammarError]:
    """Each matcher's `mask`, or the error that it raises. All share one vocabulary."""
    return [
        row.tobytes()
        if row.any()
        else GrammarError(
            matcher.compiled.kind,
            f"after {matcher.num_tokens} tokens of the completion none can follow",
        )
        for matcher, row in zip(matchers, _fill(matchers), strict=True)
    ]


def _fill(matchers: Seq[Matcher]) -> npt.NDArray[np.int32]:
    """Masks as int32[matchers, words], computed in C++ without Python's lock."""
    from xgrammar import BatchGrammarMatcher

    vocab_size = matchers[0].compiled.vocab_size
    rows = np.zeros((len(matchers), -(-vocab_size // 32)), np.int32)
    batch = BatchGrammarMatcher(max_threads=FILL_THREADS if len(matchers) > 1 else 1)
    batch.batch_fill_next_token_bitmask([matcher.xgrammar for matcher in matchers], rows)
    if padding := -vocab_size % 32:  # xgrammar sets the bits there
        rows[:, -1] &= np.int32((1 << (32 - padding)) - 1)
    return rows
