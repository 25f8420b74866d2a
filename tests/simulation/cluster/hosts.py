"""Hosts, each for one engine after another."""

from __future__ import annotations

import asyncio
from math import inf
from typing import TYPE_CHECKING

from scheduler_svc.core.sequence import Sequence
from shared.pb import scheduler_pb2 as pb
from tests.oracle import VOCAB_SIZE
from tests.simulation.cluster.engines import FAILURE, WORKERS, Process, Shape, owner_of

if TYPE_CHECKING:
    from tests.simulation.cluster.world import World


class Host:
    """Has an engine, or none, with one model or another."""

    def __init__(self, name: str, shape: Shape, model: int, world: World) -> None:
        self.name = self.address = name
        self.shape = shape
        self.model = model  # that the next engine has
        self.process: Process | None = None
        self.listed = False
        self.changed_at = 0.0  # whether it serves, is listed or is reachable
        self.cut_at = -inf  # when a link to it was last cut, or healed
        self.world = world
        self._up = asyncio.Event()

    @property
    def serving(self) -> bool:
        process = self.process
        return process is not None and process.accepts and process.serving and self.listed

    @property
    def served_model(self) -> int | None:
        return self.process.model if self.process else None

    def changed(self) -> None:
        self.changed_at = asyncio.get_running_loop().time()

    async def listens(self) -> Process:
        while self.process is None or not self.process.accepts:
            self._up.clear()
            await self._up.wait()
        return self.process

    def start(self) -> None:
        """Starts an engine, unless there is one."""
        if self.process is not None:
            return
        self.changed()
        limits = self.shape.limits
        self.process = Process(self)
        self.process.start(
            pb.EngineInfo(
                max_model_len=limits.max_model_len,
                vocab_size=VOCAB_SIZE,
                num_blocks=self.shape.num_blocks,
                block_size=self.shape.block_size,
                max_num_seqs=limits.max_num_seqs,
                max_waiting=limits.max_waiting,
                name=self.name,
                model_fingerprint=f"model {self.model}",
            )
        )
        self._up.set()

    def kill(self, back_s: float | None = None) -> None:
        """Ends the engine at once; it is started again after so long."""
        process, self.process = self.process, None
        if process is not None:
            self.changed()
            process.end()
        if back_s is not None:
            asyncio.get_running_loop().call_later(back_s, self.start)

    async def stop(self, drain_s: float) -> None:
        """Ends the engine as SIGTERM does: it informs frontends and waits for their streams."""
        process = self.process
        if process is None:
            return
        self.changed()
        process.accepts = False
        process.servicer.drain()
        await process.left(drain_s)
        if process.alive:
            await self._interrupt(process)

    async def _interrupt(self, process: Process, back_s: float | None = None) -> None:
        for call in [*process.calls]:
            call.interrupt()
        await process.left(1.0)
        if self.process is process:
            self.kill(back_s)

    def poisoned(self, process: Process, seq: Sequence) -> None:
        """Takes down what a poisonous sequence takes down."""
        if process is not self.process:
            return
        back_s = self.world.take_down(owner_of(seq).request, seq.tokens[0], self)
        if seq.tokens[0] == WORKERS:
            process.workers.lose(back_s)
            return
        process.held = {owner_of(seq), *map(owner_of, self.sequences())}
        if seq.tokens[0] == FAILURE:
            process.accepts = False
            process.servicer.fail()
            process.servicer.drain()
            self._failing = asyncio.ensure_future(self._interrupt(process, back_s))
        else:
            self.kill(back_s)

    def lose_workers(self, seconds: float) -> None:
        if self.process is not None:
            self.process.workers.lose(seconds)

    def sequences(self) -> list[Sequence]:
        """All that have not ended."""
        return [*self.process.scheduler._sequences.values()] if self.process else []
