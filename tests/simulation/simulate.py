"""Runs a seed: an engine, workers and frontends in virtual time, until all requests have ended."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from random import Random

import numpy as np

from scheduler_svc.core.blocks.block_manager import BlockManager
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.step import Step
from scheduler_svc.engine import Engine
from tests.sanitizer import Beside
from tests.simulation import virtual_time
from tests.simulation.checked_scheduler import CheckedScheduler
from tests.simulation.drafting import SimulatedSpeculation
from tests.simulation.frontends import Frontends
from tests.simulation.knobs import Knobs
from tests.simulation.workers import SimulatedWorkers
from tests.simulation.workload import plan

_MAX_SECONDS = 1_000.0
_MAX_STEPS = 20_000


class SimulationError(Exception):
    """A seed failed; the message says how."""


@dataclass(frozen=True)
class Result:
    counts: Counter[str]
    digest: int  # of all steps; equal for equal seeds


def simulate(seed: int) -> Result:
    """Runs a seed.

    Raises:
        SimulationError: something went wrong; the message says what, and shows the last steps.
    """
    rng = Random(seed)
    knobs = Knobs(rng)
    simulation = Simulation(knobs, rng)
    try:
        return virtual_time.run(simulation.run())
    except Exception as error:
        shown = f"{type(error).__name__}: {error}\nthe last steps:\n{simulation.last_steps()}"
        raise SimulationError(f"{shown}\n{knobs}") from error


class Simulation:
    def __init__(self, knobs: Knobs, rng: Random) -> None:
        self._knobs = knobs
        self._rng = rng
        self._counts: Counter[str] = Counter()
        self._workers: SimulatedWorkers | None = None

    def last_steps(self) -> str:
        return self._workers.last_steps() if self._workers else ""

    async def run(self) -> Result:
        knobs, rng, counts = self._knobs, self._rng, self._counts
        speculation = SimulatedSpeculation(knobs.drafting, rng, self._next_tokens)
        self._scheduler = CheckedScheduler(
            knobs.limits,
            BlockManager(knobs.num_blocks, knobs.paging),
            None if knobs.stages > 1 else speculation,
            knobs.stages,
        )
        self._scheduler.blocks.tier.is_there = knobs.tier_blocks > 0
        self._workers = workers = SimulatedWorkers(
            knobs, rng, self._scheduler, self._beside, self._is_poisoned, counts
        )
        self._frontends = Frontends(knobs, rng, plan(knobs, rng), counts)
        clock = asyncio.get_running_loop().time
        engine = Engine(self._scheduler, workers, self._frontends.emit, clock, sync=knobs.sync)
        running = asyncio.ensure_future(engine.run(workers.tier))
        try:
            self._frontends.serve(engine, self._scheduler)
            await self._end(running)
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await running
        counts["preemptions"] += self._scheduler.stats.preemptions
        counts["drafted tokens"] += self._scheduler.stats.draft_tokens
        counts["accepted drafts"] += self._scheduler.stats.accepted_tokens
        counts["loads"] += self._scheduler.stats.loaded_blocks
        counts["cached prompt tokens"] += self._scheduler.stats.cached_prompt_tokens
        return Result(counts, workers.digest)

    async def _end(self, running: asyncio.Future[None]) -> None:
        """Waits for the end of all requests, then for the answers still outstanding."""
        ended = self._frontends.all_ended
        await asyncio.wait(
            [running, ended], timeout=_MAX_SECONDS, return_when=asyncio.FIRST_COMPLETED
        )
        await asyncio.wait(
            [running], timeout=10 * self._knobs.longest_turn_s if ended.done() else 0
        )
        if running.done():
            running.result()
        open_sequences = self._scheduler.open_sequences()
        assert ended.done(), f"some requests wait forever; open sequences: {open_sequences}"
        scheduler = self._scheduler
        scheduler.check_integrity()
        assert scheduler.num_waiting == scheduler.num_running == 0, "not at rest"
        assert not scheduler.swaps.num_swapped, "not at rest"
        assert not scheduler.open_sequences(), "not at rest"
        free, blocks = scheduler.blocks.num_free_blocks, scheduler.blocks.num_blocks
        assert free == blocks, f"{free} blocks of {blocks} are free at rest"

    def _beside(self, step: Step) -> Beside:
        """The scheduler's knowledge as it sends a step, for the sanitizer."""
        assert self._counts["steps"] < _MAX_STEPS, "does not finish"
        owners = []
        for row in step.rows:
            attempt = self._frontends.attempt_of(row.seq)
            assert not attempt.ended, f"computes {attempt.owner.name}, which has ended"
            owners.append(attempt.owner)
        self._counts["copies"] += len(step.copies)
        held: list[int] = []
        for key in self._scheduler.open_sequences():
            held.extend(chain(*self._frontends.attempt_at(key).seq.blocks.held()))
        references = np.bincount(held, minlength=self._knobs.num_blocks)
        return Beside(owners, self._scheduler.answered, references)

    def _next_tokens(self, seq: Sequence) -> list[int]:
        return self._frontends.attempt_of(seq).owner.tokens[seq.num_generated_tokens :]

    def _is_poisoned(self, step: Step) -> bool:
        for row in step.rows:
            poison = self._frontends.attempt_of(row.seq).client.request.poison
            if poison is not None and row.start <= poison < row.start + row.num_tokens:
                return True
        return False
