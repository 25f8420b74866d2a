"""Requests to a simulated cluster, what must come of them, and the clients that send them."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from frontend.engines.pool import Engines
from frontend.engines.token_stream import FinishReason, TokenStream
from frontend.request import GenerationRequest, Sampling
from shared.errors import (
    DeadlineError,
    InvalidArgumentError,
    QueueFullError,
    ServiceError,
    UnavailableError,
)
from tests.oracle import completion
from tests.simulation.cluster.engines import DEADLY_TOKEN, TOKEN, Owner, marked, salt_of

MAX_COMPLETIONS = 3
_AGAIN_S = 0.05  # until a client retries that found no engine ready
_LATE_S = 0.5  # by which an engine may miss a deadline


@dataclass(frozen=True)
class Plan:
    """A request to come; times are in seconds of virtual time."""

    number: int
    at: float
    frontend: int
    prompt: Sequence[int]
    max_tokens: int
    n: int = 1
    eos: int | None = None
    salt: str = ""
    engine: str = ""
    timeout_s: float | None = None
    leaves_after_s: float | None = None
    poison: int = 0  # which one of `engines.POISONS`, 0: none

    def expected(self, model: int, index: int) -> tuple[list[int], FinishReason]:
        """A completion, as a model makes it."""
        seed = self.number + index + salt_of(model)
        tokens = completion(self.prompt, self.max_tokens, seed)
        if self.eos in tokens:
            return tokens[: tokens.index(self.eos) + 1], FinishReason.EOS
        return tokens, FinishReason.LENGTH

    def is_deadly(self, model: int) -> bool:
        """Whether it kills what makes its completions with a model."""
        if self.poison != TOKEN:
            return self.poison != 0
        lengths = [len(self.expected(model, index)[0]) for index in range(self.n)]
        return max(lengths) >= DEADLY_TOKEN


def plan(
    rng: Random, number: int, prefixes: Sequence[Sequence[int]], *, poison: int = 0, **facts: object
) -> Plan:
    """Makes up a prompt from a prefix that others have as well."""
    prefix = rng.choice(prefixes)
    own = [rng.randrange(900) for _ in range(rng.choice([0, 1, 3, 8]))]
    prompt = [*([poison] if poison else []), *prefix, *own, *marked(number)]
    return Plan(number=number, prompt=prompt, poison=poison, **facts)  # type: ignore[arg-type]


class Client:
    """Sends a request and reads its completions."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.streams: list[TokenStream] = []
        self.error: ServiceError | None = None  # that it was refused with
        self.left = False
        self.submitted_at = self.ended_at = 0.0
        self.first_token_at: float | None = None
        self._loop = asyncio.get_running_loop()

    @property
    def owners(self) -> list[Owner]:
        return [Owner(self.plan.number, index) for index in range(self.plan.n)]

    async def run(self, engines: Engines) -> None:
        plan = self.plan
        self.submitted_at = self._loop.time()
        stay_s = [plan.leaves_after_s, plan.timeout_s and plan.timeout_s + _LATE_S]
        try:
            async with asyncio.timeout(min((s for s in stay_s if s is not None), default=None)):
                await self._submit(engines)
                while not self._ended:
                    await self.streams[0].waiter.wait(False)
        except TimeoutError:
            self.left = True
        except (InvalidArgumentError, DeadlineError) as error:
            self.error = error
        for stream in self.streams:
            stream.close()
        self.ended_at = self._loop.time()

    @property
    def _ended(self) -> bool:
        """Whether all completions are complete, or one has failed, which ends the call."""
        return all(s.ended for s in self.streams) or any(s.error for s in self.streams)

    async def _submit(self, engines: Engines) -> None:
        request = self._request()
        while True:
            try:
                self.streams = engines.submit(request)
            except (UnavailableError, QueueFullError):
                await asyncio.sleep(_AGAIN_S)
            else:
                return

    def _request(self) -> GenerationRequest:
        plan = self.plan
        sampling = Sampling(
            seed=plan.number,
            max_tokens=plan.max_tokens,
            eos_token_ids=() if plan.eos is None else (plan.eos,),
            stop_token_ids=(),
            stop=(),
            n=plan.n,
        )
        deadline = None if plan.timeout_s is None else self.submitted_at + plan.timeout_s
        return GenerationRequest(
            str(plan.number),
            array("I", plan.prompt),
            sampling,
            deadline,
            cache_salt=plan.salt,
            engine=plan.engine,
        )
