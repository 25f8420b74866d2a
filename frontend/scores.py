"""Scores of documents for queries, by the token with which the model would answer."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import structlog
from numpy.typing import NDArray

from frontend.generations import Generations
from frontend.pooled import Pooled, PooledRequest, check_count
from nano_vllm_grpc.pb import frontend_pb2 as pb
from shared.errors import InternalError, InvalidArgumentError
from shared.sampling_params import Pooling

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Scored:
    """The log-odds of the documents of a request, and their prompts."""

    log_odds: list[float]
    prompts: Pooled

    @property
    def probabilities(self) -> list[float]:
        return [_sigmoid(each) for each in self.log_odds]


async def score_documents(
    generations: Generations, message: pb.ScoreRequest, timeout_s: float | None = None
) -> Scored:
    """Scores the documents of a request.

    Raises:
        InvalidArgumentError: a field is wrong, or the model has no tokens that tell a score.
        ServiceError: as `Generations.start`, or an engine failed.
    """
    check_count("documents", message.documents)
    if len(message.queries) not in (1, len(message.documents)):
        raise InvalidArgumentError(
            "queries", f"{len(message.queries)}; must be 1, or one for each document"
        )
    yes, no = _answer_ids(generations)
    request = PooledRequest(
        generations, message, timeout_s, pooling=Pooling.SCORE, yes_id=yes, no_id=no
    )
    limit = generations.engines.limits.max_model_len - 1
    for index, document in enumerate(message.documents):
        query, field = message.queries[index % len(message.queries)], f"documents[{index}]"
        try:
            ids = await generations.tokenizer.encode_pair(
                query, document, message.instruction, limit
            )
        except InvalidArgumentError as error:
            if error.field == "chat":
                raise InvalidArgumentError("documents", error.reason) from error
            reason = f"with its query and the instruction {error.reason}"
            raise InvalidArgumentError(field, reason) from error
        await request.add(field, token_ids=pb.TokenIds(ids=ids))
    prompts = await request.run(_check_finite)
    return Scored([float(vector[0]) for vector in prompts.vectors], prompts)


def _answer_ids(generations: Generations) -> tuple[int, int]:
    """The tokens whose logits tell a score.

    Raises:
        InvalidArgumentError: the model has none.
    """
    if ids := generations.facts.answer_ids:
        if ids[0] == ids[1]:
            raise InvalidArgumentError(
                "documents", "1_LogitScore/config.json names one token; must be two"
            )
        return ids
    token_id = generations.tokenizer.token_id
    yes, no = token_id("yes"), token_id("no")
    if yes is None or no is None:
        raise InvalidArgumentError(
            "documents", 'the model has no tokens "yes" and "no", by which it would score'
        )
    return yes, no


def _check_finite(score: NDArray[np.float32]) -> NDArray[np.float32]:
    """Raises InternalError if a score is not finite."""
    if not np.isfinite(score).all():
        log.error("a score is not finite")
        raise InternalError("internal error")
    return score


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))
