"""Features: whatever a sequence's rows need in a step beyond a temperature and a seed."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.sampling import SamplingParams


@dataclass(slots=True)
class SequenceFeatures:
    """The features of one sequence; few sequences have any. Rows that start before position `end`
    may need columns of their own. Later rows need none."""

    always: bool  # every token's row has columns
    end: int
    num_to_score: int  # leading tokens whose successor in the prompt gets log-probabilities
    num_scored: int = 0  # how many of these have been delivered
    # The sum of the hidden states of the prompt's computed tokens, or only that of the last token.
    pooled: npt.NDArray[np.float64] | None = None
    # The tokens that may come next, and those after each drafted token: uint32[ceil(vocab / 32)].
    masks: Seq[bytes] = ()


def features_of(params: SamplingParams, num_prompt_tokens: int) -> SequenceFeatures | None:
    """The features of a new sequence, or None if its rows will never need any."""
    num_to_score = end = 0
    if params.prompt_logprobs is not None:
        num_to_score = end = num_prompt_tokens - 1
    if params.pooling:
        end = num_prompt_tokens
    if params.min_tokens and (params.eos_token_ids or params.stop_token_ids):  # these are banned
        end = max(end, num_prompt_tokens + params.min_tokens - 1)
    always = params.has_features
    if always or params.stepwise:
        end = num_prompt_tokens + params.max_tokens
    return SequenceFeatures(always, end, num_to_score) if end else None
