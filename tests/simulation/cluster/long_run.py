"""A large cluster for some seconds of virtual time: engines fail, and all are updated, under load.

What is measured is the policy, of requests that find some prefixes more often than others (Zipf's
law), at engines whose pace is a model's.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from random import Random

import numpy as np

from scheduler_svc.core.admission import Limits
from tests.oracle import VOCAB_SIZE
from tests.simulation.cluster.checks import Watcher, played
from tests.simulation.cluster.engines import Shape, marked
from tests.simulation.cluster.hosts import Host
from tests.simulation.cluster.requests import Client, Plan
from tests.simulation.cluster.world import World

_START_S, _REST_S = 0.5, 6.0
_POLL_S = 0.1
_DELAY_S = 0.0003
_BLOCK = 16
_PREFIXES, _ZIPF = 1000, 1.0
_AT_ONCE = 0.125  # of the engines, in a rolling update
SHAPE = Shape(
    Limits(
        max_num_seqs=256,
        max_num_batched_tokens=4096,
        max_model_len=1024,
        max_waiting=1000,
        vocab_size=VOCAB_SIZE,
    ),
    num_blocks=3000,
    block_size=_BLOCK,
    step_s=0.012,
    prompt_token_s=1e-5,
    decode_s=1e-5,
)


class LongRun:
    def __init__(
        self,
        rng: Random,
        directory: Path,
        *,
        engines: int,
        frontends: int,
        seconds: float,
        requests_per_s: int = 10_000,
    ) -> None:
        self._rng = rng
        self._directory = directory
        self._engines, self._frontends = engines, frontends
        self._seconds = seconds
        count = round(requests_per_s * seconds)
        self._plans = [*self._plan(count)]

    async def run(self) -> dict[str, float]:
        """Returns figures by name. Raises AssertionError if an invariant is violated."""
        world = World(
            self._rng,
            self._directory,
            num_frontends=self._frontends,
            models=[0],
            delays=lambda: _DELAY_S,
            poison_back_s=lambda _: 0.0,
        )
        for _ in range(self._engines):
            world.add_host(SHAPE, 0)
        clients = [Client(plan) for plan in self._plans]
        operating = self._operate(world)
        async with played(world, clients, operating, poll_s=_POLL_S, rest_s=_REST_S) as watcher:
            return self._figures(world, clients, watcher)

    async def _operate(self, world: World) -> None:
        """An engine dies and comes back, one is lost for good, one loses its workers, and one is
        partitioned from a frontend; then all are updated."""
        hosts, unit_s = world.hosts, self._seconds / 10
        await asyncio.sleep(_START_S + unit_s)
        hosts[0].kill(back_s=unit_s)
        await asyncio.sleep(unit_s)
        hosts[1].kill()
        await asyncio.sleep(unit_s)
        hosts[2].lose_workers(unit_s)
        world.set_listed([hosts[1]], listed=False)
        await asyncio.sleep(unit_s)
        world.cut(world.frontends[0], hosts[3])
        await asyncio.sleep(unit_s)
        world.heal(world.frontends[0], hosts[3])
        at_once = max(round(_AT_ONCE * len(hosts)), 1)
        listed = [host for host in hosts if host.listed]
        for first in range(0, len(listed), at_once):
            await self._update(world, listed[first : first + at_once])

    async def _update(self, world: World, hosts: Sequence[Host]) -> None:
        world.set_listed(hosts, listed=False)
        await asyncio.sleep(0.3)
        for host in hosts:
            await host.stop(drain_s=0.1)
        await asyncio.sleep(0.1)
        for host in hosts:
            host.start()
        world.set_listed(hosts)
        world.counts["updates"] += len(hosts)
        await asyncio.sleep(0.1)

    def _plan(self, count: int) -> Iterator[Plan]:
        rng = self._rng
        lengths = [rng.randint(2, 10) * _BLOCK for _ in range(_PREFIXES)]
        prefixes = [[rng.randrange(900) for _ in range(length)] for length in lengths]
        weights = [*accumulate(1 / rank**_ZIPF for rank in range(1, _PREFIXES + 1))]
        at = _START_S
        for number in range(1, count + 1):
            at += rng.expovariate(count / self._seconds)
            (prefix,) = rng.choices(prefixes, cum_weights=weights)
            own = [rng.randrange(900) for _ in range(rng.randint(4, 40))]
            yield Plan(
                number=number,
                at=at,
                frontend=rng.randrange(self._frontends),
                prompt=[*prefix, *own, *marked(number)],
                max_tokens=rng.randint(1, 12),
            )

    def _figures(
        self, world: World, clients: Sequence[Client], watcher: Watcher
    ) -> dict[str, float]:
        streams = [(client, stream) for client in clients for stream in client.streams]
        starts = [stream.start.cached_prompt_tokens for _, stream in streams if stream.start]
        prompts = [plan.prompt for plan in self._plans]
        num_prompt_tokens = sum(map(len, prompts))
        figures = dict[str, float](
            world.counts,
            requests=len(clients),
            tokens=sum(len(stream.tokens) for _, stream in streams),
        )
        figures["hit rate"] = sum(starts) / num_prompt_tokens
        figures["hit rate of one endless cache"] = _ideal(prompts) / num_prompt_tokens
        first_token_s = [
            stream.first_token_at - client.submitted_at
            for client, stream in streams
            if stream.first_token_at is not None
        ]
        for name, values in (
            ("first token, s", first_token_s),
            ("routing of a request, s of CPU", world.routing_cpu_s),
            ("imbalance: most/mean sequences", watcher.imbalances),
        ):
            for share in (50, 99, 100) if values else ():
                figures[f"{name}, p{share}"] = float(np.percentile(values, share))
        return figures


def _ideal(prompts: Sequence[Sequence[int]]) -> int:
    """The tokens that prompts, one after the other, would find in one cache without an end."""
    known: set[bytes] = set()
    found = 0
    for prompt in prompts:
        ids = array("i", prompt)
        blocks = [ids[:end].tobytes() for end in range(_BLOCK, len(ids), _BLOCK)]
        held = next((i for i, each in enumerate(blocks) if each not in known), len(blocks))
        found += held * _BLOCK
        known.update(blocks)
    return found
