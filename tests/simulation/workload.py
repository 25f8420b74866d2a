"""The requests of a simulation, and how each must end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from random import Random
from typing import Any

import numpy as np

from scheduler_svc.core.client import ANONYMOUS, Client
from scheduler_svc.core.sampling import SamplingParams
from scheduler_svc.core.sequence import FinishCause, Sequence, SequenceKey
from scheduler_svc.core.sequence import Request as SchedulerRequest
from tests.oracle import VOCAB_SIZE, completion, states
from tests.sanitizer import Owner
from tests.simulation.knobs import Knobs


@dataclass(frozen=True)
class Request:
    """A client's request; `tokens` is the completion it must get if nothing cuts it short."""

    number: int
    frontend: int
    at: float
    prompt: list[int]
    params: SamplingParams
    tokens: list[int]
    cause: FinishCause
    n: int = 1  # completions of this prompt, submitted together: this and the next ones
    siblings: int = 0  # its index among those
    resumed: int = 0  # number of tokens that it already has
    priority: int = 0
    salt: int = 0
    client: Client = ANONYMOUS
    deadline: float | None = None
    abort_at: float | None = None
    abort_after: int | None = None  # tokens, as a frontend does at a stop string
    poison: int | None = None  # the position whose token makes the workers fail

    def sequence(
        self, key: SequenceKey, tokens: list[int], now: float, *, resubmitted: bool = False
    ) -> Sequence:
        """The sequence that the scheduler makes of a submission that already has `tokens`."""
        request = SchedulerRequest(
            arrival=now,
            deadline=self.deadline,
            priority=self.priority,
            cache_salt=f"{self.salt or ''}",
            resubmitted=resubmitted,
            client=self.client,
        )
        return Sequence(key, self.prompt, self.params, request, generated_ids=tokens)

    def owner(self, number: int, name: str, delivered: list[int]) -> Owner:
        """The owner of a sequence that begins with the tokens `delivered`."""
        tokens = [*delivered, *self._tokens[len(delivered) :]]
        of_tokens = np.array(states(self.prompt + tokens[:-1]))
        return Owner(name, number, self.salt, self.params, self.prompt, of_tokens, tokens)

    def cause_after(self, tokens: list[int]) -> FinishCause | None:
        """The cause of an end after `tokens`, if they are all. Written independently of the
        scheduler's code."""
        if not self.tokens:  # can never be served
            return self.cause
        if tokens and tokens[-1] in self.params.eos_token_ids:
            return FinishCause.EOS
        if tokens and tokens[-1] in self.params.stop_token_ids:
            return FinishCause.STOP_TOKEN
        return FinishCause.LENGTH if len(tokens) == self.params.max_tokens else None

    @cached_property
    def _tokens(self) -> list[int]:
        return _completion(self.prompt, self.params, self.params.max_tokens)


def plan(knobs: Knobs, rng: Random) -> list[Request]:
    """Draws all requests, in order of time."""
    requests: list[Request] = []
    clients = _clients(knobs, rng)
    at, left = 0.0, 0
    while (number := len(requests)) < knobs.requests:
        if not left:
            at += rng.uniform(0, knobs.pause_s)
            left = rng.randint(1, knobs.burst)
        left -= 1
        if rng.random() < knobs.refused:
            requests.append(_refused(knobs, rng, number, at))
        else:
            requests += _served(knobs, rng, number, at, requests, rng.choice(clients))
    return requests


def _clients(knobs: Knobs, rng: Random) -> list[Client]:
    """Draws the clients that requests come from."""
    clients = []
    for number in range(knobs.clients):
        budgets = [rng.randint(200, 2000) if rng.random() < knobs.limited else 0 for _ in range(2)]
        clients.append(Client(f"client {number}", rng.choice([0.5, 1.0, 3.0]), *budgets))
    return clients or [ANONYMOUS]


def _served(
    knobs: Knobs, rng: Random, number: int, at: float, earlier: list[Request], client: Client
) -> list[Request]:
    """Draws one request, or several that are completions of one prompt."""

    def maybe(probability: float, value: Callable[[], Any]) -> Any:
        return value() if rng.random() < probability else None

    prompt = _prompt(knobs, rng, earlier)
    room = knobs.max_model_len - len(prompt)
    max_tokens = rng.randint(1, min(room, knobs.max_new_tokens))
    seed = rng.choice([rng.getrandbits(64), (1 << 64) - 1])
    tokens = completion(prompt, max_tokens, seed)
    eos, stop = (
        frozenset(maybe(knobs.ends / 2, lambda: {rng.choice(tokens)}) or ()) for _ in range(2)
    )
    params = SamplingParams(
        max_tokens,
        seed=seed,
        eos_token_ids=eos,
        stop_token_ids=stop,
        min_tokens=maybe(knobs.min_tokens, lambda: rng.randint(1, max_tokens)) or 0,
        logprobs=maybe(knobs.logprobs, lambda: rng.randint(0, 3)),
        prompt_logprobs=maybe(knobs.logprobs, lambda: rng.randint(0, 3)),
        **(maybe(knobs.filters, lambda: _filters(rng, tokens)) or {}),
    )
    tokens, cause = _end(params, prompt)
    lasts = knobs.longest_turn_s * len(tokens) + knobs.pause_s
    n = maybe(knobs.many, lambda: rng.randint(2, 4)) or 1
    first = Request(
        number=number,
        frontend=rng.randrange(knobs.frontends),
        at=at,
        prompt=prompt,
        params=params,
        tokens=tokens,
        cause=cause,
        n=n,
        resumed=0 if n > 1 else maybe(knobs.resumed, lambda: rng.randint(0, len(tokens))) or 0,
        priority=rng.randrange(knobs.priorities) - 1,
        salt=rng.randrange(knobs.salts),
        client=client,
        deadline=maybe(knobs.deadlines, lambda: at + rng.uniform(0, lasts)),
        abort_at=maybe(knobs.aborts / 2, lambda: at + rng.uniform(0, lasts)),
        abort_after=maybe(knobs.aborts / 2, lambda: rng.randint(1, len(tokens))),
        poison=maybe(knobs.poisons, lambda: rng.randrange(len(prompt) + len(tokens))),
    )
    return [first, *(_sibling(first, i) for i in range(1, n))]


def _sibling(first: Request, i: int) -> Request:
    """The request for completion i of the first one's prompt."""
    seed = (first.params.seed + i) % (1 << 64)
    params = replace(first.params, seed=seed, prompt_logprobs=None)
    tokens, cause = _end(params, first.prompt)
    return replace(
        first,
        number=first.number + i,
        n=1,
        siblings=i,
        params=params,
        tokens=tokens,
        cause=cause,
        abort_at=None if first.abort_at is None else first.abort_at + i * 0.01,
        abort_after=None,
    )


def _filters(rng: Random, tokens: list[int]) -> dict[str, Any]:
    """Draws what changes logits. Bad words are parts of the completion without them."""
    starts = [rng.randrange(len(tokens)) for _ in range(rng.randint(0, 2))]
    bias = rng.sample(range(VOCAB_SIZE), rng.randint(0, 3))
    return {
        "top_k": rng.choice([0, 1, 5]),
        "top_p": rng.choice([1.0, 0.5]),
        "min_p": rng.choice([0.0, 0.1]),
        "repetition_penalty": rng.choice([1.0, 1.5]),
        "presence_penalty": rng.choice([0.0, 1.0]),
        "frequency_penalty": rng.choice([0.0, -0.5]),
        "bad_words": tuple(tuple(tokens[at : at + rng.randint(1, 3)]) for at in starts),
        "bias_ids": tuple(bias),
        "bias_values": tuple(rng.choice([-100.0, 2.0]) for _ in bias),
    }


def _refused(knobs: Knobs, rng: Random, number: int, at: float) -> Request:
    too_long = [2] * knobs.max_model_len
    bad: list[tuple[list[int], SamplingParams, int]] = [
        ([], SamplingParams(1), 1),
        ([VOCAB_SIZE], SamplingParams(1), 1),
        ([3, -1], SamplingParams(1), 1),
        ([1], SamplingParams(0), 1),
        ([1], SamplingParams(knobs.max_model_len), 1),
        (too_long, SamplingParams(1), 1),
        ([1], SamplingParams(1, min_tokens=2), 1),
        ([1], SamplingParams(1, top_p=float("nan")), 1),
        ([1], SamplingParams(1, bias_ids=(VOCAB_SIZE,), bias_values=(1.0,)), 1),
        ([1], SamplingParams(1), 65),
    ]
    prompt, params, n = rng.choice(bad)
    frontend = rng.randrange(knobs.frontends)
    return Request(number, frontend, at, prompt, params, [], FinishCause.INVALID, n)


def _prompt(knobs: Knobs, rng: Random, earlier: list[Request]) -> list[int]:
    """Draws a prompt that leaves at least one token for the completion."""
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


def _completion(prompt: list[int], params: SamplingParams, num_tokens: int) -> list[int]:
    """The completion, as if no token ended it."""
    ends = params.eos_token_ids | params.stop_token_ids
    return completion(prompt, num_tokens, params.seed, params.min_tokens, ends, params.bad_words)


def _end(params: SamplingParams, prompt: list[int]) -> tuple[list[int], FinishCause]:
    """A completion up to its end, and its cause. Written independently of the scheduler's code."""
    tokens = _completion(prompt, params, params.max_tokens)
    for place, token in enumerate(tokens):
        if token in params.eos_token_ids:
            return tokens[: place + 1], FinishCause.EOS
        if token in params.stop_token_ids:
            return tokens[: place + 1], FinishCause.STOP_TOKEN
    return tokens, FinishCause.LENGTH
