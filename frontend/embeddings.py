"""Embeddings of prompts. An engine pools the hidden states of each; here they are normalized."""

from __future__ import annotations

import asyncio
import time
import uuid
from contextlib import closing
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from frontend.generation import Generation, Totals
from frontend.generations import Generations
from frontend.request import Pooling
from nano_vllm_grpc.pb import frontend_pb2 as pb
from shared.errors import InvalidArgumentError

MAX_INPUTS = 2048  # of a request
_AT_ONCE = 64  # inputs of a request that an engine has, so that they do not fill its queue
_GREEDY = pb.SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


@dataclass(frozen=True)
class Embedded:
    """The embeddings of a request, each [dimensions] with a norm of 1, and its prompt tokens."""

    request_id: str
    vectors: list[NDArray[np.float32]]
    prompt_tokens: int
    cached_prompt_tokens: int


class Embeddings:
    """Embeds prompts with one model."""

    def __init__(self, generations: Generations, pooling: Pooling) -> None:
        self._generations = generations
        self._pooling = pooling

    async def embed(self, request: pb.EmbedRequest, timeout_s: float | None = None) -> Embedded:
        """Embeds the prompts of a request. If one fails, it cancels the others.

        Raises:
            InvalidArgumentError: a field is wrong.
            ServiceError: as `Generations.start`, or an engine failed.
        """
        if not 1 <= (count := len(request.inputs)) <= MAX_INPUTS:
            raise InvalidArgumentError("inputs", f"{count} inputs; must be 1 to {MAX_INPUTS}")
        if request.dimensions < 0:
            raise InvalidArgumentError("dimensions", f"{request.dimensions}; must be 0 or more")
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        request_id = request.request_id or uuid.uuid4().hex
        slots = asyncio.Semaphore(_AT_ONCE)

        async def run(index: int) -> tuple[NDArray[np.float32], Totals]:
            async with slots:
                message = _message(request, request_id, index)
                try:
                    generation = await self._run(message, deadline)
                    return _normalized(
                        generation.embedding, request.dimensions
                    ), generation.totals()
                except InvalidArgumentError as error:
                    if error.field not in ("text", "prompt") and "token_ids" not in error.field:
                        raise
                    field = f"inputs[{index}].{error.field}"
                    raise InvalidArgumentError(field, error.reason) from error

        tasks = [asyncio.create_task(run(index)) for index in range(count)]
        try:
            ended = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return Embedded(
            request_id,
            [vector for vector, _ in ended],
            sum(totals.prompt_tokens for _, totals in ended),
            sum(totals.cached_prompt_tokens for _, totals in ended),
        )

    async def _run(self, message: pb.GenerateRequest, deadline: float | None) -> Generation:
        """Runs a request to its end, which is that of its prompt: its one token means nothing."""
        received_at = time.monotonic()
        request = await self._generations.check(message, deadline, None)
        request = replace(request, sampling=replace(request.sampling, pooling=self._pooling))
        with closing(await self._generations.begin(request, received_at)) as generation:
            while not generation.ended:
                await generation.next_deltas()
        return generation


def _message(request: pb.EmbedRequest, request_id: str, index: int) -> pb.GenerateRequest:
    message = pb.GenerateRequest(
        request_id=request_id,
        sampling=_GREEDY,
        priority=request.priority,
        cache_salt=request.cache_salt,
        engine=request.engine,
    )
    given = request.inputs[index]
    if given.HasField("text"):
        message.text = given.text
    elif given.HasField("token_ids"):
        message.token_ids.CopyFrom(given.token_ids)
    return message


def _normalized(vector: NDArray[np.float32], dimensions: int) -> NDArray[np.float32]:
    """The first `dimensions` of a vector, or all if that is 0, with a norm of 1.

    Raises:
        InvalidArgumentError: there are fewer dimensions.
    """
    if dimensions > len(vector):
        raise InvalidArgumentError("dimensions", f"{dimensions}; the model has {len(vector)}")
    part = vector[: dimensions or None].astype(np.float64)
    return (part / max(np.linalg.norm(part), np.finfo(np.float64).tiny)).astype(np.float32)
