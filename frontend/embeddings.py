"""Embeddings of prompts. An engine pools the hidden states of each; here they are normalized."""

from __future__ import annotations

import numpy as np
import structlog
from numpy.typing import NDArray

from frontend.generations import Generations
from frontend.pooled import Pooled, PooledRequest, check_count
from frontend.text.model_files import ModelFacts
from nano_vllm_grpc.pb import frontend_pb2 as pb
from shared.errors import InternalError, InvalidArgumentError
from shared.sampling_params import Pooling

log = structlog.get_logger(__name__)

MAX_NUMBERS = 1 << 21  # of all embeddings of a request


async def embed(
    generations: Generations, message: pb.EmbedRequest, timeout_s: float | None = None
) -> Pooled:
    """Embeds the prompts of a request -> vectors [dimensions] with a norm of 1.

    Raises:
        InvalidArgumentError: a field is wrong.
        ServiceError: as `Generations.start`, or an engine failed.
    """
    check_count("inputs", message.inputs)
    _check_dimensions(message, generations.facts)
    request = PooledRequest(generations, message, timeout_s, pooling=generations.facts.pooling)
    for index, given in enumerate(message.inputs):
        kind = given.WhichOneof("prompt")
        prompt = {kind: getattr(given, kind)} if kind else {}
        await request.add(f"inputs[{index}]", **prompt)
    return await request.run(lambda vector: _normalized(vector, message.dimensions))


def _check_dimensions(message: pb.EmbedRequest, facts: ModelFacts) -> None:
    """Raises InvalidArgumentError: too few dimensions, too many numbers, or no known pooling."""
    dimensions = message.dimensions
    if facts.pooling is Pooling.NONE:
        raise InvalidArgumentError(
            "inputs", "1_Pooling/config.json asks for another pooling; see POOLING"
        )
    if not 0 <= dimensions <= facts.hidden_size:
        raise InvalidArgumentError("dimensions", f"{dimensions}; must be 0 to {facts.hidden_size}")
    each = dimensions or facts.hidden_size
    if each * len(message.inputs) > MAX_NUMBERS:
        raise InvalidArgumentError(
            "inputs",
            f"{len(message.inputs)} inputs; with {each} dimensions the limit is "
            f"{MAX_NUMBERS // each}",
        )


def _normalized(vector: NDArray[np.float32], dimensions: int) -> NDArray[np.float32]:
    """The first `dimensions` of a vector, or all if that is 0, with a norm of 1.

    Raises:
        InternalError: it has no such norm.
    """
    part = vector[: dimensions or None].astype(np.float64)
    norm = np.linalg.norm(part)
    if not 0 < norm < np.inf:
        log.error("an embedding has no direction", norm=float(norm))
        raise InternalError("internal error")
    return (part / norm).astype(np.float32)
