"""Embeddings of prompts. An engine pools the hidden states of each; here they are normalized."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable
from contextlib import closing
from dataclasses import dataclass, replace

import numpy as np
import structlog
from numpy.typing import NDArray

from frontend.generation import Generation, Totals
from frontend.generations import Generations
from frontend.request import GenerationRequest
from nano_vllm_grpc.pb import frontend_pb2 as pb
from shared.errors import InternalError, InvalidArgumentError, QueueFullError
from shared.sampling_params import Pooling

log = structlog.get_logger(__name__)

MAX_INPUTS = 2048  # of a request
MAX_NUMBERS = 1 << 21  # of all its embeddings
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

    def __init__(self, generations: Generations) -> None:
        self._generations = generations

    async def embed(self, request: pb.EmbedRequest, timeout_s: float | None = None) -> Embedded:
        """Embeds the prompts of a request. If one fails, it cancels the others.

        Raises:
            InvalidArgumentError: a field is wrong.
            ServiceError: as `Generations.start`, or an engine failed.
        """
        check_count("inputs", len(request.inputs))
        self._check_dimensions(request)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        request_id = request.request_id or uuid.uuid4().hex
        # All are checked before the first one is computed.
        checked = [
            await self._check(_message(request, request_id, index), index, deadline)
            for index in range(len(request.inputs))
        ]
        slots, queue = asyncio.Semaphore(_AT_ONCE), _Queue()

        async def run(each: GenerationRequest) -> tuple[NDArray[np.float32], Totals]:
            async with slots:
                generation = await queue.run(lambda: self._run(each))
            return _normalized(generation.embedding, request.dimensions), generation.totals()

        tasks = [asyncio.create_task(run(each)) for each in checked]
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

    def _check_dimensions(self, request: pb.EmbedRequest) -> None:
        """
        Raises:
            InvalidArgumentError: there are fewer dimensions, too many numbers, or no pooling.
        """
        facts, dimensions = self._generations.facts, request.dimensions
        if facts.pooling is Pooling.NONE:
            raise InvalidArgumentError(
                "inputs", "1_Pooling/config.json asks for another pooling; see POOLING"
            )
        if not 0 <= dimensions <= facts.hidden_size:
            raise InvalidArgumentError(
                "dimensions", f"{dimensions}; must be 0 to {facts.hidden_size}"
            )
        each = dimensions or facts.hidden_size
        if each * len(request.inputs) > MAX_NUMBERS:
            raise InvalidArgumentError(
                "inputs",
                f"{len(request.inputs)} inputs; with {each} dimensions the limit is "
                f"{MAX_NUMBERS // each}",
            )

    async def _check(
        self, message: pb.GenerateRequest, index: int, deadline: float | None
    ) -> GenerationRequest:
        try:
            request = await self._generations.check(message, deadline, None)
        except InvalidArgumentError as error:
            if error.field not in ("text", "prompt") and "token_ids" not in error.field:
                raise
            field = f"inputs[{index}].{error.field}"
            raise InvalidArgumentError(field, error.reason) from error
        sampling = replace(request.sampling, pooling=self._generations.facts.pooling)
        return replace(request, sampling=sampling)

    async def _run(self, request: GenerationRequest) -> Generation:
        """Runs a request to its end, which is that of its prompt: its one token means nothing."""
        with closing(await self._generations.begin(request, time.monotonic())) as generation:
            while not generation.ended:
                await generation.next_deltas()
        return generation


class _Queue:
    """Repeats inputs that engines have no room for, while other inputs of the request run."""

    def __init__(self) -> None:
        self._num_accepted = 0  # inputs that are at an engine, or have ended there

    async def run(self, start: Callable[[], Awaitable[Generation]]) -> Generation:
        """
        Raises:
            QueueFullError: no input of the request was accepted.
        """
        while True:
            self._num_accepted += 1
            try:
                return await start()
            except QueueFullError as error:
                self._num_accepted -= 1
                if not self._num_accepted:
                    raise
                await asyncio.sleep(error.retry_after_s)


def check_count(field: str, count: int) -> None:
    """
    Raises:
        InvalidArgumentError: there are no inputs, or too many.
    """
    if not 1 <= count <= MAX_INPUTS:
        raise InvalidArgumentError(field, f"{count} inputs; must be 1 to {MAX_INPUTS}")


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
        InternalError: it has no such norm.
    """
    part = vector[: dimensions or None].astype(np.float64)
    norm = np.linalg.norm(part)
    if not 0 < norm < np.inf:
        log.error("an embedding has no direction", norm=float(norm))
        raise InternalError("internal error")
    return (part / norm).astype(np.float32)
