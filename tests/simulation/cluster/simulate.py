"""Runs a seed: a cluster in virtual time, until all requests have ended and nothing is left."""

from __future__ import annotations

import zlib
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from frontend.engines.deaths import MIN_DEATHS_BEFORE_ALONE
from scheduler_svc.core.admission import Limits
from tests.oracle import VOCAB_SIZE
from tests.simulation import virtual_time
from tests.simulation.cluster.checks import played
from tests.simulation.cluster.engines import FAILURE, POISONS, STEP, TOKEN, WORKERS, Shape
from tests.simulation.cluster.faults import CHANGE_MODELS, KINDS, Faults
from tests.simulation.cluster.requests import MAX_COMPLETIONS, Client, Plan, plan
from tests.simulation.cluster.world import World
from tests.simulation.drafting import Chances
from tests.simulation.simulate import Result, SimulationError

_MAX_S = 700.0  # a completion waits up to 300 s for an engine with its model to return
_REST_S = 6.0
_POLL_S = 0.05
# Engines that a request takes down before it stays where it is: one more if tokens that it makes
# before are lost on their way, and come from the next.
_BLAST = {STEP: 2, WORKERS: 2, FAILURE: 2, TOKEN: 3}


def simulate(seed: int) -> Result:
    """Runs a seed.

    Raises:
        SimulationError: something went wrong; the message says what.
    """
    with TemporaryDirectory(prefix="nano") as directory:
        simulation = Simulation(Random(seed), Path(directory))
        try:
            return virtual_time.run(simulation.run())
        except Exception as error:
            described = simulation.described
            raise SimulationError(f"{type(error).__name__}: {error}\n{described}") from error


class Simulation:
    def __init__(self, rng: Random, directory: Path) -> None:
        self._rng = rng
        self._directory = directory
        self._window_s = rng.choice([0.5, 5.0, 15.0])
        self._num_hosts, self._num_frontends = rng.randint(2, 4), rng.randint(1, 3)
        self._kinds = rng.choices(KINDS, k=rng.choice([0, 0, 1, 2, 4, 8]))
        poisons = rng.choices(POISONS, k=rng.choice([0, 0, 1, 2] if self._kinds else [0, 1, 1]))
        self._is_calm = not self._kinds and not poisons
        self._models = (0, 1) if CHANGE_MODELS & {*self._kinds} else (0,)
        self._plans = self._plan_requests(poisons)
        self._shape = _shape(rng, self._is_calm)
        # Until workers are back that a request took down: at times they have weights to load.
        self._back_s = 0.5 if self._kinds else rng.choice([0.5, 25.0])
        self.described = (
            f"{self._num_hosts} engines of {self._shape}, {self._num_frontends} frontends, "
            f"{len(self._plans)} requests in {self._window_s} s; {', '.join(self._kinds)}; "
            f"poison: {[p.poison for p in self._plans if p.poison]}, back in {self._back_s} s"
        )

    async def run(self) -> Result:
        rng = self._rng
        world = World(
            rng,
            self._directory,
            num_frontends=self._num_frontends,
            models=self._models,
            delays=lambda: rng.choice([0.0, 0.001, 0.05]) * rng.random(),
            poison_back_s=lambda kind: rng.uniform(0.01, self._back_s if kind == WORKERS else 0.5),
        )
        for _ in range(self._num_hosts):
            world.add_host(self._shape, 0)
        faults = Faults(world, rng)
        for kind in self._kinds:
            faults.plan(kind, rng.uniform(0.5, 0.5 + 1.2 * self._window_s))
        clients = [Client(each) for each in self._plans]
        rest_s = _REST_S + self._back_s
        async with played(
            world, clients, faults.over(), poll_s=_POLL_S, rest_s=rest_s, max_s=_MAX_S
        ):
            self._check_blast(world)
            self._count(world, clients)
        facts = [(c.ended_at, *map(_facts, c.streams)) for c in clients]
        return Result(world.counts, zlib.crc32(repr(facts).encode()))

    def _plan_requests(self, poisons: list[int]) -> list[Plan]:
        rng = self._rng
        count = rng.choice([20, 100] if self._is_calm else [0, 5, 20, 50])
        prefixes = [
            [rng.randrange(900) for _ in range(rng.choice([0, 5, 17, 33]))] for _ in range(3)
        ]
        choices_of_n = [1] * (1 if len(self._models) > 1 else 3) + [MAX_COMPLETIONS]
        plans = []
        for number in range(1, count + len(poisons) + 1):
            poison = poisons.pop() if number > count else 0
            n = 1 if poison else rng.choice(choices_of_n)
            plans.append(
                plan(
                    rng,
                    4 * number,  # each completion has a seed of its own
                    prefixes,
                    poison=poison,
                    at=0.5 + rng.uniform(0, self._window_s) * rng.choice([0.1, 1.0]),
                    frontend=rng.randrange(self._num_frontends),
                    max_tokens=rng.choice([1, 4, 12, 50]),
                    n=n,
                    salt=rng.choice(["", "", "", "salt"]),
                    engine="" if self._is_calm else rng.choice([""] * 15 + ["engine-1"]),
                    timeout_s=None if poison or rng.random() < 0.9 else rng.uniform(0.1, 8),
                    leaves_after_s=None if poison or rng.random() < 0.9 else rng.uniform(0, 3),
                )
            )
        for i, each in enumerate(plans):
            if rng.random() < 0.2:
                tokens, _ = each.expected(0, 0)
                plans[i] = Plan(**{**vars(each), "eos": rng.choice(tokens)})
        return plans

    def _check_blast(self, world: World) -> None:
        """Poison that nothing else helps takes down two engines at most."""
        for each in self._plans:
            taken = set(world.taken_down.get(each.number, ()))
            if taken:
                world.counts[f"poisonous requests that took down {len(taken)} engines"] += 1
            if not self._kinds:
                most = _BLAST.get(each.poison, 0)
                assert len(taken) <= most, f"request {each.number} took down {taken}"
            if not self._kinds and len(self._plans) == 1 and each.poison in (STEP, FAILURE):
                deaths = len(world.taken_down[each.number])
                assert deaths <= MIN_DEATHS_BEFORE_ALONE + 1, f"{deaths} schedulers died"

    def _count(self, world: World, clients: list[Client]) -> None:
        counts = world.counts
        counts["requests"] += len(clients)
        counts["tokens"] += sum(len(stream.tokens) for c in clients for stream in c.streams)
        for host in world.hosts:
            if host.process is not None:
                counts["cached prompt tokens"] += host.process.scheduler.stats.cached_prompt_tokens


def _facts(stream: Any) -> tuple[object, ...]:
    return tuple(stream.tokens), stream.number, str(stream.finish), str(stream.error)


def _shape(rng: Random, is_calm: bool) -> Shape:
    limits = Limits(
        max_num_seqs=rng.choice([1, 2, 4, 16]),
        max_num_batched_tokens=rng.choice([16, 64]),
        max_model_len=100,
        max_waiting=1000 if is_calm else rng.choice([2, 10, 1000]),
        vocab_size=VOCAB_SIZE,
    )
    return Shape(
        limits,
        num_blocks=rng.choice([25, 64, 256]),
        block_size=4,
        step_s=rng.choice([0.002, 0.02]),
        prompt_token_s=rng.choice([1e-5, 1e-3]),
        decode_s=1e-4,
        drafting=Chances(drafts=rng.choice([0.0, 0.5]), right=0.8, waits=0.5),
    )
