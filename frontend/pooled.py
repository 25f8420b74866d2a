"""Runs many prompts of which no completion is wanted, but a vector or a number."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from frontend.generation import Generation, Totals
from frontend.generations import Generations
from frontend.request import GenerationRequest
from nano_vllm_grpc.pb import frontend_pb2 as pb
from shared.errors import InvalidArgumentError, QueueFullError

Vector = NDArray[np.float32]
MAX_INPUTS = 2048  # of a request
MAX_TOKENS = 1 << 22  # of all inputs; a query counts with each of its documents
_AT_ONCE = 64  # inputs of a request that an engine has, so that they do not fill its queue
_GREEDY = pb.SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


@dataclass(frozen=True)
class Pooled:
    """A float32 array for each prompt of a request, and the numbers of the prompts' tokens."""

    request_id: str
    vectors: list[Vector]
    prompt_tokens: int
    cached_prompt_tokens: int


class PooledRequest:
    """One request with many prompts.

    Args:
        message: the request, whose common fields hold for all prompts.
        timeout_s: after this time it fails; None: never.
        sampling: fields of `Sampling`, which say what is made of a prompt.
    """

    def __init__(
        self,
        generations: Generations,
        message: pb.EmbedRequest | pb.ScoreRequest,
        timeout_s: float | None,
        **sampling: Any,
    ) -> None:
        self._generations = generations
        self._message = message
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._sampling = sampling
        self.request_id = message.request_id or uuid.uuid4().hex
        self._checked: list[GenerationRequest] = []
        self._num_tokens = 0
        self._num_accepted = 0  # prompts that are at an engine, or have ended there

    async def add(self, field: str, **prompt: Any) -> None:
        """Checks a prompt, given as fields of `GenerateRequest`, before any one is computed.

        Raises:
            InvalidArgumentError: a field is wrong; `field` is that of the prompt.
            ServiceError: as `Generations.check`.
        """
        message = pb.GenerateRequest(
            request_id=self.request_id,
            sampling=_GREEDY,
            priority=self._message.priority,
            cache_salt=self._message.cache_salt,
            engine=self._message.engine,
            **prompt,
        )
        try:
            request = await self._generations.check(message, self._deadline, None)
        except InvalidArgumentError as error:
            if error.field not in ("text", "prompt") and "token_ids" not in error.field:
                raise
            raise InvalidArgumentError(f"{field}.{error.field}", error.reason) from error
        self._num_tokens += len(request.prompt_ids)
        if self._num_tokens > MAX_TOKENS:
            count = f"{self._num_tokens} tokens with those before"
            raise InvalidArgumentError(field, f"{count}; the limit is {MAX_TOKENS}")
        sampling = replace(request.sampling, **self._sampling)
        self._checked.append(replace(request, sampling=sampling))

    async def run(self, finish: Callable[[Vector], Vector]) -> Pooled:
        """Runs the prompts. If one fails, it cancels the others.

        Args:
            finish: turns the array of a prompt into the one to keep.

        Raises:
            ServiceError: as `Generations.begin`, an engine failed, or `finish` raised it.
        """
        slots = asyncio.Semaphore(_AT_ONCE)

        async def run(each: GenerationRequest) -> tuple[Vector, Totals]:
            async with slots:
                generation = await self._run_or_repeat(each)
            return finish(generation.embedding), generation.totals()

        tasks = [asyncio.create_task(run(each)) for each in self._checked]
        try:
            ended = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return Pooled(
            self.request_id,
            [vector for vector, _ in ended],
            sum(totals.prompt_tokens for _, totals in ended),
            sum(totals.cached_prompt_tokens for _, totals in ended),
        )

    async def _run_or_repeat(self, request: GenerationRequest) -> Generation:
        """Runs a request to its end, which is that of its prompt: its one token means nothing.
        Repeats it if engines have no room for it while others run.

        Raises:
            QueueFullError: none of the prompts was accepted.
        """
        while True:
            self._num_accepted += 1
            try:
                started = await self._generations.begin(request, time.monotonic())
                with closing(started) as generation:
                    while not generation.ended:
                        await generation.next_deltas()
                return generation
            except QueueFullError as error:
                self._num_accepted -= 1
                if not self._num_accepted:
                    raise
                await asyncio.sleep(error.retry_after_s)


def check_count(field: str, inputs: Sequence[Any]) -> None:
    """Raises InvalidArgumentError if there are no inputs, or too many."""
    if not 1 <= len(inputs) <= MAX_INPUTS:
        raise InvalidArgumentError(field, f"{len(inputs)} inputs; must be 1 to {MAX_INPUTS}")
