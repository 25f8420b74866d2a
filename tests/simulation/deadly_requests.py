"""Requests that kill schedulers: what they may cost, and whom they may not hurt."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from functools import partial
from math import ceil, log2
from random import Random
from typing import Any

from frontend.engines.engine import Engine
from frontend.engines.token_stream import TokenStream
from shared.errors import InternalError
from shared.suspects import MIN_LOSSES, MIN_LOSSES_ALONE
from tests.oracle import completion
from tests.simulation import virtual_time
from tests.simulation.successions import (
    DEADLY,
    DEADLY_TOKEN,
    READ,
    STEP,
    TOKEN,
    WORKERS,
    World,
    ends,
    submit,
)

_MAX_S = 2000.0  # of virtual time


def bound(num_requests: int) -> int:
    """The schedulers that one culprit among so many requests costs at most."""
    return max(MIN_LOSSES + ceil(log2(num_requests)), 2 + MIN_LOSSES_ALONE)


async def play(
    rng: Random, prompts: list[list[int]], *, frontends: int, window_s: float = 0.0, kills: int = 0
) -> tuple[int, int]:
    """Submits requests at random times, kills and restarts schedulers at others, and checks every
    end. Returns how many schedulers died of requests, and how many innocents were convicted."""
    world = World(rng, frontends)
    loop = asyncio.get_running_loop()
    for _ in range(kills):
        loop.call_later(rng.uniform(0, window_s + 3), rng.choice([world.kill, world.restart]))

    async def one(prompt: list[int]) -> tuple[list[int], TokenStream, bool]:
        client: Engine = rng.choice(world.clients)
        await asyncio.sleep(rng.uniform(0, window_s))
        stream = await submit(client, prompt, max_tokens=rng.choice([1, 8, 20]))
        leaves = prompt[0] not in DEADLY and rng.random() < 0.1
        if leaves:
            await asyncio.sleep(rng.uniform(0, 5))
            client.close(stream)
        else:
            await ends(client, stream)
        return prompt, stream, leaves

    async with asyncio.timeout(_MAX_S):
        found = await asyncio.gather(*map(one, prompts))
    await world.close()
    wronged = 0
    for prompt, stream, leaves in found:
        if prompt[0] in (*DEADLY, WORKERS) and not leaves:
            if prompt[0] == TOKEN and stream.request.sampling.max_tokens < DEADLY_TOKEN:
                continue
            assert isinstance(stream.error, InternalError), (prompt, stream.error, stream.tokens)
        elif not leaves:
            wronged += stream.error is not None
        expected = completion(prompt, stream.request.sampling.max_tokens)
        assert list(stream.tokens) == expected[: len(stream.tokens)]
        assert leaves or stream.error or list(stream.tokens) == expected
    return world.deaths, wronged


def run(rng: Random, prompts: list[list[int]], **options: Any) -> tuple[int, int]:
    return virtual_time.run(play(rng, prompts, frontends=rng.randint(1, 3), **options))


def innocents(count: int) -> list[list[int]]:
    return [[7, number] for number in range(count)]


def one_culprit_costs_a_logarithm_of_schedulers(rng: Random, kind: int) -> int:
    """With tokens on their way, a few more: they may be lost, and come from the next scheduler."""
    prompts = [*innocents(rng.choice([0, 1, 2, 7, 30])), [kind, 1]]
    deaths, wronged = run(rng, prompts)
    assert not wronged
    assert deaths <= bound(len(prompts)) + (DEADLY_TOKEN if kind == TOKEN else 0)
    return deaths


def many_culprits_cost_as_often_as_much(rng: Random) -> int:
    count = rng.randint(2, 4)
    prompts = innocents(20) + [[rng.choice((READ, STEP)), i] for i in range(count)]
    deaths, wronged = run(rng, prompts)
    assert not wronged
    assert deaths <= count * bound(len(prompts))
    return deaths


def requests_that_kill_anything_at_any_time_end_alone(rng: Random) -> int:
    """Those that kill workers are among them, and a scheduler that one request is not to blame
    for; one such death is too few to convict anything that was tried then."""
    kinds = [rng.choice((*DEADLY, WORKERS)) for _ in range(rng.randint(1, 5))]
    prompts = innocents(rng.choice([3, 20])) + [[kind, i] for i, kind in enumerate(kinds)]
    deaths, wronged = run(rng, prompts, window_s=rng.choice([0.5, 5.0]), kills=1)
    assert not wronged
    return deaths


def schedulers_that_die_of_nothing_convict_nothing(rng: Random) -> int:
    deaths, wronged = run(rng, innocents(20), window_s=5.0, kills=rng.randint(5, 15))
    assert not deaths
    assert not wronged
    return deaths


SCENES: dict[str, Callable[[Random], int]] = {
    "killed when read": partial(one_culprit_costs_a_logarithm_of_schedulers, kind=READ),
    "killed by a step": partial(one_culprit_costs_a_logarithm_of_schedulers, kind=STEP),
    "killed by a token": partial(one_culprit_costs_a_logarithm_of_schedulers, kind=TOKEN),
    "killed by several": many_culprits_cost_as_often_as_much,
    "killed by anything": requests_that_kill_anything_at_any_time_end_alone,
    "killed by nothing": schedulers_that_die_of_nothing_convict_nothing,
}


def simulate(seed: int) -> Counter[str]:
    """Plays each scene; counts the schedulers that died of requests in it."""
    return Counter({name: play_scene(Random(seed)) for name, play_scene in SCENES.items()})
