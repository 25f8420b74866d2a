"""The requests of a simulation, and how each has to end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from random import Random
from typing import Any

import numpy as np

from scheduler_svc.sequence import FinishCause, SamplingParams, Sequence, SequenceKey
from tests.oracle import VOCAB_SIZE, completion, states
from tests.sanitizer import Owner
from tests.simulation.knobs import Knobs
from tests.step_columns import Ints


@dataclass(frozen=True)
class Request:
    """What one client asks for; `tokens` are what it is to get if nothing cuts it short."""

    number: int
    frontend: int
    at: float
    prompt: list[int]
    params: SamplingParams
    tokens: list[int]
    cause: FinishCause
    resumed: int = 0  # tokens that it has already
    priority: int = 0
    salt: int = 0
    deadline: float | None = None
    abort_at: float | None = None
    abort_after: int | None = None  # tokens, as a frontend does at a stop string

    def sequence(
        self, key: SequenceKey, tokens: list[int], now: float, *, resubmitted: bool = False
    ) -> Sequence:
        """As the scheduler's server makes it from a submission that has `tokens` already."""
        return Sequence(
            key,
            self.prompt,
            self.params,
            generated_ids=tokens,
            arrival=now,
            deadline=self.deadline,
            priority=self.priority,
            cache_salt=f"{self.salt or ''}",
            resubmitted=resubmitted,
        )

    def owner(self, number: int, name: str) -> Owner:
        return Owner(name, number, self.salt, self.params.seed, self._states)

    @cached_property
    def _states(self) -> Ints:
        everything = self.prompt + completion(self.prompt, self.params.max_tokens - 1)
        return np.array(states(everything))


def plan(knobs: Knobs, rng: Random) -> list[Request]:
    """In order of time."""
    requests: list[Request] = []
    at, left = 0.0, 0
    for number in range(knobs.requests):
        if not left:
            at += rng.uniform(0, knobs.pause_s)
            left = rng.randint(1, knobs.burst)
        left -= 1
        make = _refused if rng.random() < knobs.refused else _served
        requests.append(make(knobs, rng, number, at, requests))
    return requests


def _served(knobs: Knobs, rng: Random, number: int, at: float, earlier: list[Request]) -> Request:
    def maybe(probability: float, value: Callable[[], Any]) -> Any:
        return value() if rng.random() < probability else None

    prompt = _prompt(knobs, rng, earlier)
    room = knobs.max_model_len - len(prompt)
    max_tokens = rng.randint(1, min(room, knobs.most_new_tokens))
    tokens = completion(prompt, max_tokens)
    eos, stop = (
        frozenset(maybe(knobs.ends / 2, lambda: {rng.choice(tokens)}) or ()) for _ in range(2)
    )
    params = SamplingParams(
        max_tokens, seed=rng.getrandbits(64), eos_token_ids=eos, stop_token_ids=stop
    )
    tokens, cause = _end(tokens, params)
    lasts = knobs.longest_turn_s * len(tokens) + knobs.pause_s
    return Request(
        number=number,
        frontend=rng.randrange(knobs.frontends),
        at=at,
        prompt=prompt,
        params=params,
        tokens=tokens,
        cause=cause,
        resumed=maybe(knobs.resumed, lambda: rng.randint(0, len(tokens))) or 0,
        priority=rng.randrange(knobs.priorities) - 1,
        salt=rng.randrange(knobs.salts),
        deadline=maybe(knobs.deadlines, lambda: at + rng.uniform(0, lasts)),
        abort_at=maybe(knobs.aborts / 2, lambda: at + rng.uniform(0, lasts)),
        abort_after=maybe(knobs.aborts / 2, lambda: rng.randint(1, len(tokens))),
    )


def _refused(knobs: Knobs, rng: Random, number: int, at: float, earlier: list[Request]) -> Request:
    prompt, max_tokens = rng.choice(
        [
            ([], 1),
            ([VOCAB_SIZE], 1),
            ([3, -1], 1),
            ([1], 0),
            ([1], knobs.max_model_len),
            ([2] * knobs.max_model_len, 1),
        ]
    )
    params = SamplingParams(max_tokens)
    frontend = rng.randrange(knobs.frontends)
    return Request(number, frontend, at, prompt, params, [], FinishCause.INVALID)


def _prompt(knobs: Knobs, rng: Random, earlier: list[Request]) -> list[int]:
    """At least one token is left for the completion."""
    longest = min(knobs.longest_prompt, knobs.max_model_len - 1)
    fresh = [rng.randrange(knobs.prompt_ids) for _ in range(rng.randint(1, longest))]
    kind = rng.random()
    before = rng.choice(earlier) if earlier else None
    if before is None or before.cause is FinishCause.INVALID:
        return fresh
    if kind < knobs.turns:
        fresh = before.prompt + before.tokens + fresh[: rng.randint(0, 3)]
    elif kind < knobs.turns + knobs.repeats:
        fresh = before.prompt[: rng.choice([None, rng.randint(1, len(before.prompt))])]
    return fresh[: knobs.max_model_len - 1]


def _end(tokens: list[int], params: SamplingParams) -> tuple[list[int], FinishCause]:
    """The end of a completion, written down once more, apart from the scheduler's code."""
    for place, token in enumerate(tokens):
        if token in params.eos_token_ids:
            return tokens[: place + 1], FinishCause.EOS
        if token in params.stop_token_ids:
            return tokens[: place + 1], FinishCause.STOP_TOKEN
    return tokens, FinishCause.LENGTH
