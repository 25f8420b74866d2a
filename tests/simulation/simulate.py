"""Runs a seed: an engine, workers and frontends in virtual time, until all requests have ended."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np

from scheduler_svc.core.block_manager import BlockManager
from scheduler_svc.core.step import Step
from scheduler_svc.engine import Engine
from tests.sanitizer import Beside
from tests.simulation import virtual_time
from tests.simulation.checked_scheduler import CheckedScheduler
from tests.simulation.frontends import Frontends
from tests.simulation.knobs import Knobs, draw
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
    knobs = draw(rng)
    try:
        return virtual_time.run(Simulation(knobs, rng).run())
    except (SimulationError, virtual_time.DeadlockError) as error:
        raise SimulationError(f"{error}\n{knobs}") from error.__cause__


class Simulation:
    def __init__(self, knobs: Knobs, rng: Random) -> None:
        self._knobs = knobs
        self._rng = rng
        self._counts: Counter[str] = Counter()

    async def run(self) -> Result:
        knobs, rng, counts = self._knobs, self._rng, self._counts
        self._scheduler = CheckedScheduler(
            knobs.limits, BlockManager(knobs.num_blocks, knobs.block_size)
        )
        self._workers = SimulatedWorkers(
            knobs, rng, self._scheduler, self._beside, self._is_poisoned, counts
        )
        self._frontends = Frontends(knobs, rng, plan(knobs, rng), counts)
        clock = asyncio.get_running_loop().time
        engine = Engine(
            self._scheduler, self._workers, self._frontends.emit, clock, sync=knobs.sync
        )
        running = asyncio.ensure_future(engine.run())
        failed = _failed_callback()
        try:
            self._frontends.serve(engine, self._scheduler)
            await self._end(running, failed)
        except Exception as error:
            shown = f"{type(error).__name__}: {error}\nthe last steps:\n"
            raise SimulationError(shown + self._workers.last_steps()) from error
        finally:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await running
        self._count()
        return Result(counts, self._workers.digest)

    async def _end(self, *endless: asyncio.Future[None]) -> None:
        """Waits for the end of all requests, then for the answers still outstanding."""
        ended = self._frontends.all_ended
        await asyncio.wait(
            [*endless, ended], timeout=_MAX_SECONDS, return_when=asyncio.FIRST_COMPLETED
        )
        await asyncio.wait(
            endless,
            timeout=10 * self._knobs.longest_turn_s if ended.done() else 0,
            return_when=asyncio.FIRST_COMPLETED,
        )
        for future in endless:
            if future.done():
                future.result()
        open_sequences = self._scheduler.open_sequences()
        assert ended.done(), f"some requests wait forever; open sequences: {open_sequences}"
        scheduler = self._scheduler
        scheduler.check_integrity()
        assert scheduler.num_waiting == scheduler.num_running == 0, "not at rest"
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
            held.extend(self._frontends.attempt_at(key).seq.block_table)
        references = np.bincount(held, minlength=self._knobs.num_blocks)
        return Beside(owners, self._scheduler.answered, references)

    def _is_poisoned(self, step: Step) -> bool:
        for row in step.rows:
            poison = self._frontends.attempt_of(row.seq).client.request.poison
            if poison is not None and row.start <= poison < row.start + row.num_tokens:
                return True
        return False

    def _count(self) -> None:
        stats = self._scheduler.stats
        self._counts["preemptions"] += stats.preemptions
        self._counts["cached prompt tokens"] += stats.cached_prompt_tokens


def _failed_callback() -> asyncio.Future[None]:
    """A future that fails with the first exception of a callback, which asyncio would only log."""
    loop = asyncio.get_running_loop()
    failed: asyncio.Future[None] = loop.create_future()

    def fail(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if not failed.done():
            failed.set_exception(context.get("exception") or AssertionError(context["message"]))

    loop.set_exception_handler(fail)
    return failed
