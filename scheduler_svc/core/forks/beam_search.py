"""Beam search: the most likely continuations of the live beams become the next live beams.

The search follows transformers 5's `GenerationMixin._beam_search` with `do_sample=False` and
`early_stopping=False`, step for step and in float32. The same log-probabilities therefore give the
same hypotheses in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.sampling import num_continuations

# Tokens that may follow a live beam: ids int[k] and log-probabilities float32[k], descending.
Candidates = tuple[npt.ArrayLike, npt.ArrayLike]


class Hypothesis(NamedTuple):
    """A finished completion. `end_token` is its last token, or None at the maximum length."""

    token_ids: tuple[int, ...]
    score: float  # sum of log-probabilities / length ** length_penalty
    end_token: int | None


class Continuation(NamedTuple):
    """A live beam of the next step: a live beam of this step, extended by a token."""

    parent: int
    token: int


# A beam's tokens, the last token first: (tokens before, token), None at the start. Beams share
# their common tokens, so that the time of a step does not depend on their length.
_Path = tuple["_Path | None", int]


class _Beam(NamedTuple):
    path: _Path | None
    score: np.float32  # sum of log-probabilities


class _Found(NamedTuple):
    """A hypothesis whose tokens are not gathered yet."""

    path: _Path
    score: float
    end_token: int | None


class BeamSearch:
    """Searches for the best completions of one prompt. The prompt is the first live beam.

    Args:
        width: the number of live beams, and of hypotheses at the end.
        length_penalty: above 0 it favours long completions, below 0 short ones.
        end_token_ids: all tokens that end a completion; they count as a part of it.
        max_tokens, min_tokens: of a completion; before `min_tokens` no end token is chosen.
    """

    def __init__(
        self,
        width: int,
        length_penalty: float,
        end_token_ids: Iterable[int],
        max_tokens: int,
        min_tokens: int = 0,
    ) -> None:
        self.width = width
        self.length_penalty = length_penalty
        self.end_token_ids = frozenset(end_token_ids)
        self.max_tokens = max_tokens
        self.min_tokens = min_tokens
        self.num_tokens = 0  # of each live beam
        self._found: list[_Found] = []  # best first
        self._live = [_Beam(None, np.float32(0))]
        self._num_kept = num_continuations(width, len(self.end_token_ids))
        self._ends = np.array(sorted(self.end_token_ids), np.int64)

    @property
    def hypotheses(self) -> list[Hypothesis]:
        """The best completions, best first; final once there is no live beam."""
        return [Hypothesis(_token_ids(path), score, end) for path, score, end in self._found]

    def advance(self, candidates: Seq[Candidates]) -> list[Continuation]:
        """Chooses the next live beams, best first; none if the search has ended.

        Args:
            candidates: one entry per live beam, in order.
        """
        self.num_tokens += 1
        at_limit = self.num_tokens == self.max_tokens
        live: list[tuple[Continuation, _Beam]] = []
        for rank, (parent, token, score) in enumerate(self._best(candidates)):
            path = (self._live[parent].path, token)
            ends = token in self.end_token_ids
            if not (ends or at_limit):
                if len(live) < self.width:
                    live.append((Continuation(parent, token), _Beam(path, score)))
            elif rank < self.width:  # later ranks only replace beams that end
                found = _Found(path, self._penalized(score), token if ends else None)
                self._found.append(found)
        self._found.sort(key=lambda h: -h.score)  # stable: the first found leads among equals
        del self._found[self.width :]
        if live and not self._may_improve(live[0][1].score):
            live = []
        self._live = [beam for _, beam in live]
        return [continuation for continuation, _ in live]

    def _best(self, candidates: Seq[Candidates]) -> list[tuple[int, int, np.float32]]:
        """The best continuations (beam, token, sum of log-probabilities), best first; among
        equals the lowest beam, then the lowest token."""
        tokens = [np.asarray(ids, np.int64) for ids, _ in candidates]
        scores = [
            np.asarray(logprobs, np.float32) + beam.score
            for (_, logprobs), beam in zip(candidates, self._live, strict=True)
        ]
        token, score = np.concatenate(tokens), np.concatenate(scores)
        parent = np.repeat(np.arange(len(tokens)), [len(ids) for ids in tokens])
        if self.num_tokens <= self.min_tokens:  # counts the token being chosen
            allowed = ~np.isin(token, self._ends)
            parent, token, score = parent[allowed], token[allowed], score[allowed]
        order = np.lexsort((token, parent, -score))[: self._num_kept]
        return [(int(parent[i]), int(token[i]), score[i]) for i in order]

    def _may_improve(self, best: np.float32) -> bool:
        """Whether the best live beam would rank among the hypotheses if it ended now. The scores
        that it might still reach are ignored, which is the heuristic of `early_stopping=False`."""
        if len(self._found) < self.width:
            return True
        return self._penalized(best) > self._found[-1].score

    def _penalized(self, score: np.float32) -> float:
        return float(score / np.float32(float(self.num_tokens) ** self.length_penalty))


def _token_ids(path: _Path | None) -> tuple[int, ...]:
    token_ids = []
    while path is not None:
        path, token = path
        token_ids.append(token)
    return tuple(reversed(token_ids))
