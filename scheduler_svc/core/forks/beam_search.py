"""Beam search: the most likely continuations of the live beams become the next live beams.

The search follows transformers 5's `GenerationMixin._beam_search` with `do_sample=False` and
`early_stopping=False`, step for step and in float32. The same log-probabilities therefore give the
same hypotheses in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.sampling import SamplingParams, num_continuations

# Tokens that may follow a live beam: ids int[k] and log-probabilities float32[k], descending.
Candidates = tuple[npt.ArrayLike, npt.ArrayLike]


class Hypothesis(NamedTuple):
    """A finished completion."""

    token_ids: tuple[int, ...]
    score: float  # sum of log-probabilities / length ** length_penalty


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


class BeamSearch:
    """Searches for the best completions of one prompt. The prompt is the first live beam.

    There are `beam_width` live beams, and hypotheses at the end. An end token counts as a part of
    its completion. A `length_penalty` above 0 favours long completions, one below 0 short ones.
    """

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self.num_tokens = 0  # of each live beam
        self._found: list[tuple[float, _Path]] = []  # scores and tokens of hypotheses, best first
        self._live = [_Beam(None, np.float32(0))]
        self._ends = np.array(sorted(params.end_token_ids), np.int64)
        self._num_kept = num_continuations(params.beam_width, len(self._ends))

    @property
    def hypotheses(self) -> list[Hypothesis]:
        """The best completions, best first; final once there is no live beam."""
        return [Hypothesis(_token_ids(path), score) for score, path in self._found]

    def advance(self, candidates: Seq[Candidates]) -> list[Continuation]:
        """Chooses the next live beams, best first; none if the search has ended.

        Args:
            candidates: one entry per live beam, in order.
        """
        self.num_tokens += 1
        at_limit = self.num_tokens == self._params.max_tokens
        width, end_token_ids = self._params.beam_width, self._params.end_token_ids
        live: list[tuple[Continuation, _Beam]] = []
        for rank, (parent, token, score) in enumerate(self._best(candidates)):
            path = (self._live[parent].path, token)
            if not (token in end_token_ids or at_limit):
                if len(live) < width:
                    live.append((Continuation(parent, token), _Beam(path, score)))
            elif rank < width:  # later ranks only replace beams that end
                self._found.append((self._penalized(score), path))
        self._found.sort(key=lambda each: -each[0])  # stable: the first found leads among equals
        del self._found[width:]
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
        if self.num_tokens <= self._params.min_tokens:  # counts the token being chosen
            allowed = ~np.isin(token, self._ends)
            parent, token, score = parent[allowed], token[allowed], score[allowed]
        order = np.lexsort((token, parent, -score))[: self._num_kept]
        return [(int(parent[i]), int(token[i]), score[i]) for i in order]

    def _may_improve(self, best: np.float32) -> bool:
        """Whether the best live beam would rank among the hypotheses if it ended now. The scores
        that it might still reach are ignored, which is the heuristic of `early_stopping=False`."""
        if len(self._found) < self._params.beam_width:
            return True
        return self._penalized(best) > self._found[-1][0]

    def _penalized(self, score: np.float32) -> float:
        return float(score / np.float32(float(self.num_tokens) ** self._params.length_penalty))


def _token_ids(path: _Path | None) -> tuple[int, ...]:
    token_ids = []
    while path is not None:
        path, token = path
        token_ids.append(token)
    return tuple(reversed(token_ids))
