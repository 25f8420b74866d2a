"""Requests that kill schedulers: what they may cost, and whom they may not hurt."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from frontend.engines.deaths import MIN_DEATHS_BEFORE_ALONE
from scheduler_svc.core.admission import Limits
from shared.errors import InternalError
from tests.oracle import VOCAB_SIZE
from tests.simulation import virtual_time
from tests.simulation.cluster.checks import played
from tests.simulation.cluster.engines import (
    DEADLY_TOKEN,
    FAILURE,
    READ,
    STEP,
    TOKEN,
    WORKERS,
    Shape,
    marked,
)
from tests.simulation.cluster.hosts import Host
from tests.simulation.cluster.requests import Client, Plan
from tests.simulation.cluster.world import World

_DEADLY = (READ, STEP, TOKEN, FAILURE)
MAX_DEATHS = MIN_DEATHS_BEFORE_ALONE + 1  # of schedulers, for each culprit
_MAX_S = 2000.0  # of virtual time
_POLL_S, _REST_S = 0.5, 6.0
_LIMITS = Limits(
    max_num_seqs=4,
    max_num_batched_tokens=16,
    max_model_len=64,
    max_waiting=1000,
    vocab_size=VOCAB_SIZE,
)
_SHAPE = Shape(
    _LIMITS, num_blocks=256, block_size=4, step_s=0.01, prompt_token_s=1e-4, decode_s=1e-4
)


def play(
    rng: Random, innocents: int, culprits: Sequence[int] = (), window_s: float = 0.0, kills: int = 0
) -> int:
    """Submits innocent requests, and a request of each kind in `culprits`, at random times; kills
    and restarts schedulers at others. Each culprit must end with INTERNAL, and nobody else, unless
    kills convict it by chance (`cluster.losses`). Returns how many schedulers died of requests."""
    frontends, plans = rng.randint(1, 3), []
    for number, poison in enumerate([0] * innocents + [*culprits], start=1):
        leaves = not poison and rng.random() < 0.1
        plan = Plan(
            number=number,
            at=rng.uniform(0, window_s),
            frontend=rng.randrange(frontends),
            prompt=[poison or 7, *marked(number)],
            max_tokens=rng.choice([1, 8, 20]),
            leaves_after_s=rng.uniform(0, 5) if leaves else None,
            poison=poison,
        )
        plans.append(plan)
    with TemporaryDirectory(prefix="nano") as directory:
        return virtual_time.run(_play(rng, plans, Path(directory), frontends, window_s, kills))


async def _play(
    rng: Random, plans: Sequence[Plan], directory: Path, frontends: int, window_s: float, kills: int
) -> int:
    world = World(
        rng,
        directory,
        num_frontends=frontends,
        models=[0],
        delays=lambda: rng.choice([0.0, 0.001, 0.05]) * rng.random(),
        poison_back_s=lambda _: rng.uniform(0.01, 0.5),
    )
    host = world.add_host(_SHAPE, 0)
    clients = [Client(plan) for plan in plans]
    faults = asyncio.gather(*(_harm(host, rng, rng.uniform(0, window_s + 3)) for _ in range(kills)))
    async with played(world, clients, faults, poll_s=_POLL_S, rest_s=_REST_S, max_s=_MAX_S):
        pass
    for client in clients:
        errors = [type(stream.error) for stream in client.streams if stream.error]
        expected = [InternalError] * client.plan.is_deadly(0)
        assert errors == expected or (kills and errors == [InternalError]), (client.plan, errors)
    kinds = {plan.number: plan.poison for plan in plans}
    return sum(len(at) for number, at in world.taken_down.items() if kinds[number] in _DEADLY)


async def _harm(host: Host, rng: Random, at: float) -> None:
    """Kills the scheduler, or restarts it in an orderly way."""
    await asyncio.sleep(at)
    if rng.random() < 0.5:
        await host.stop(0.0)
    host.kill(rng.uniform(0.01, 0.5))


def one_culprit_costs_four_schedulers(rng: Random, kind: int) -> int:
    """With tokens on their way, a few more: they may be lost, and come from the next scheduler."""
    innocents = rng.choice([0, 1, 2, 7, 30])
    deaths = play(rng, innocents, [kind])
    assert deaths <= MAX_DEATHS + (DEADLY_TOKEN if kind == TOKEN else 0)
    return deaths


def many_culprits_cost_as_often_as_much(rng: Random) -> int:
    culprits = rng.choices((READ, STEP), k=rng.randint(2, 4))
    deaths = play(rng, 20, culprits)
    assert deaths <= len(culprits) * MAX_DEATHS
    return deaths


def requests_that_kill_anything_at_any_time_end_alone(rng: Random) -> int:
    """Some requests kill workers, and one scheduler is killed from outside. One such death is too
    few to convict a request that was tried then."""
    culprits = rng.choices((*_DEADLY, WORKERS), k=rng.randint(1, 5))
    return play(rng, rng.choice([3, 20]), culprits, window_s=rng.choice([0.5, 5.0]), kills=1)


def schedulers_that_die_of_nothing_convict_only_by_chance(rng: Random) -> int:
    deaths = play(rng, 20, window_s=5.0, kills=rng.randint(5, 15))
    assert not deaths
    return deaths


SCENES: dict[str, Callable[[Random], int]] = {
    "killed when read": partial(one_culprit_costs_four_schedulers, kind=READ),
    "killed by a step": partial(one_culprit_costs_four_schedulers, kind=STEP),
    "killed by a token": partial(one_culprit_costs_four_schedulers, kind=TOKEN),
    "killed by several": many_culprits_cost_as_often_as_much,
    "killed by anything": requests_that_kill_anything_at_any_time_end_alone,
    "killed by nothing": schedulers_that_die_of_nothing_convict_only_by_chance,
}


def simulate(seed: int) -> Counter[str]:
    """Plays each scene; counts the schedulers that died of requests in it."""
    return Counter({name: play_scene(Random(seed)) for name, play_scene in SCENES.items()})
