"""Builds a completion from its tokens: text, stop strings, and where it ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from frontend.logprobs import LogprobRow
from frontend.request import Sampling
from frontend.text.detokenizer import IncrementalDetokenizer
from frontend.text.stop_strings import StopStringMatcher
from shared.vocabulary import Vocabulary


@dataclass(slots=True)
class Delta:
    """An increment of a completion; `offset` is the index of the first of `token_ids`.

    `logprobs` has one row per token, and `prompt_logprobs` is set on a call's first delta, each
    only if requested.
    """

    text: str
    token_ids: Sequence[int]
    offset: int
    logprobs: Sequence[LogprobRow] = ()
    prompt_logprobs: Sequence[LogprobRow] = ()


class CompletionBuilder:
    """Turns tokens into deltas. The text does not depend on how the tokens are grouped.

    A token that ends the completion by itself (end of sequence, a stop token) is always in the
    token ids. Neither this token nor a stop string is in the text, unless the request asks for
    both. Stop strings count only after the first `min_tokens` tokens, as in vLLM.
    """

    def __init__(self, vocabulary: Vocabulary, sampling: Sampling) -> None:
        self._detokenizer = IncrementalDetokenizer(vocabulary)
        self._matcher = None
        if sampling.stop:
            self._matcher = StopStringMatcher(sampling.stop, include=sampling.include_stop)
        self._silent = frozenset(sampling.silent_ids)
        self._min_tokens = sampling.min_tokens
        self.num_tokens = 0
        self.stop_string: str | None = None  # the one found, which ends the completion

    def feed(self, token_ids: Sequence[int]) -> Delta:
        """Adds the next tokens, up to the one that completes a stop string."""
        offset = self.num_tokens
        if self._matcher is None:
            text = self._decode(token_ids)
        else:
            text, token_ids = self._feed_until_stop(self._matcher, token_ids)
        self.num_tokens += len(token_ids)
        return Delta(text, token_ids, offset)

    def finish(self) -> str:
        """Returns the text held back so far. Call it once no more tokens will come."""
        if self.stop_string is not None:
            return ""
        text = self._detokenizer.flush()
        if self._matcher is None:
            return text
        ignore = self.num_tokens <= self._min_tokens
        text, match = self._matcher.feed(text, ignore=ignore)
        if match is not None:
            self.stop_string = match.stop
        return text + self._matcher.flush()

    def _feed_until_stop(
        self, matcher: StopStringMatcher, token_ids: Sequence[int]
    ) -> tuple[str, Sequence[int]]:
        ignored = max(0, self._min_tokens - self.num_tokens)
        texts = [self._decode((token_id,)) for token_id in token_ids]
        before, _ = matcher.feed("".join(texts[:ignored]), ignore=True)
        text, match = matcher.feed("".join(texts[ignored:]))
        if match is not None:
            self.stop_string = match.stop
            lengths = accumulate(map(len, texts[ignored:]))
            count = next(i for i, length in enumerate(lengths, 1) if length >= match.end)
            token_ids = token_ids[: ignored + count]
        return before + text, token_ids

    def _decode(self, token_ids: Sequence[int]) -> str:
        if self._silent.isdisjoint(token_ids):
            return self._detokenizer.feed(token_ids)
        return self._detokenizer.feed([t for t in token_ids if t not in self._silent])
