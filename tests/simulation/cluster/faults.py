"""Faults of a simulated cluster, and what its operators do."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any

from scheduler_svc.block_watch import watches_of
from scheduler_svc.core.blocks.block_manager import BlockManager
from tests.simulation.cluster.hosts import Host
from tests.simulation.cluster.world import World

_GONE_S = 5.0  # for which operators wait for frontends to leave an engine that is off the list
CHANGE_MODELS = {"other model", "all replaced", "dies in a row"}


class Faults:
    """Faults at random times; the first host always comes back with the first model."""

    def __init__(self, world: World, rng: Random) -> None:
        self._world = world
        self._rng = rng
        self._tasks: list[asyncio.Task[None]] = []
        self._operating = asyncio.Lock()

    def plan(self, kind: str, at: float) -> None:
        """Has something happen at a time."""
        work = _WORK[kind](self)
        self._tasks.append(asyncio.ensure_future(self._at(at, kind, work)))

    async def over(self) -> None:
        """Returns once everything has happened that was planned."""
        await asyncio.gather(*self._tasks)

    async def _at(self, at: float, kind: str, work: Coroutine[Any, Any, None]) -> None:
        try:
            await asyncio.sleep(at)
        except asyncio.CancelledError:
            work.close()
            raise
        self._world.counts[kind] += 1
        await work

    def _any(self) -> Host:
        return self._rng.choice(self._world.hosts)

    def _other(self) -> Host:
        """One that may be away for long, or for good."""
        return self._rng.choice(self._world.hosts[1:] or self._world.hosts)

    async def _die(self) -> None:
        self._any().kill(self._rng.choice([0.01, 0.3, 5.0]) * self._rng.random())

    async def _die_in_a_row(self) -> None:
        """An engine dies twice within a moment, and comes back as another, or as it was."""
        host = self._any()
        host.kill(0.0)
        await asyncio.sleep(self._rng.uniform(0.1, 0.5))
        host.model = self._rng.choice([host.model, self._world.models[-1]])
        host.kill(self._rng.uniform(0.0, 0.3))

    async def _replace_all(self) -> None:
        """All engines end at once, and come back with another model."""
        async with self._operating:
            for host in self._world.hosts:
                if host.process is not None:
                    host.kill(self._rng.uniform(0.1, 2.0))
                    host.model = self._world.models[-1]

    async def _lose_workers(self) -> None:
        self._any().lose_workers(self._rng.choice([0.05, 3.0]) * self._rng.random())

    async def _partition(self) -> None:
        """Cuts a host off from one frontend, or from all."""
        host, frontends = self._any(), self._world.frontends
        if self._rng.random() < 0.5:
            frontends = [self._rng.choice(frontends)]
        for frontend in frontends:
            self._world.cut(frontend, host)
        await asyncio.sleep(self._rng.choice([0.2, 6.0]) * self._rng.random())
        for frontend in frontends:
            self._world.heal(frontend, host)

    async def _cut_off(self) -> None:
        """Has an engine end its frontends' streams, in an orderly way."""
        host = self._any()
        if host.process is not None:
            host.changed()
            for connection in host.process.servicer._connections.values():
                connection.cut_off("too slow")

    async def _evict_first_blocks(self) -> None:
        """Cached prefixes lose their first blocks. Watchers fall behind, and learn of it from a
        snapshot."""
        for host in self._world.hosts:
            if host.process is not None:
                blocks = host.process.scheduler.blocks
                _evict_first_blocks(blocks)
                for watch in watches_of(blocks):
                    watch.fell_behind = True

    async def _stop(self) -> None:
        """As Kubernetes stops a pod and starts it again, with its address on the list."""
        async with self._operating:
            host = self._any()
            await host.stop(self._rng.choice([0.0, 2.0]))
            await asyncio.sleep(self._rng.random())
            host.start()

    async def update(self, model: int | None = None) -> None:
        """One engine after the other leaves the list, loses its streams, and comes back, with
        `model` if that is given."""
        async with self._operating:
            for host in [host for host in self._world.hosts if host.listed]:
                if len(self._world.hosts) > 1:
                    self._world.set_listed([host], listed=False)
                    await self._left(host)
                await host.stop(self._rng.choice([0.0, 1.0]))
                if model is not None:
                    host.model = model
                await asyncio.sleep(self._rng.random())
                host.start()
                self._world.set_listed([host])
                await asyncio.sleep(self._rng.random())

    async def _change_model(self) -> None:
        await self.update(self._world.models[-1])

    async def _scale_up(self) -> None:
        host = self._world.hosts[0]
        self._world.add_host(host.shape, self._rng.choice(self._world.hosts).model)

    async def _scale_down(self) -> None:
        async with self._operating:
            host = self._other()
            if host is not self._world.hosts[0]:
                self._world.set_listed([host], listed=False)
                await self._left(host)
                await host.stop(0.0)

    async def _lose(self) -> None:
        host = self._other()
        if host is not self._world.hosts[0]:
            host.kill()
            await asyncio.sleep(self._rng.uniform(0, 3))
            self._world.set_listed([host], listed=False)

    async def _left(self, host: Host) -> None:
        """Waits until no frontend is connected to a host, for a while."""
        patience_s = self._rng.choice([0.5, _GONE_S])
        if host.process is not None:
            await host.process.left(patience_s)


_WORK: dict[str, Callable[[Faults], Coroutine[Any, Any, None]]] = {
    "scheduler dies": Faults._die,
    "workers lost": Faults._lose_workers,
    "partition": Faults._partition,
    "connections cut off": Faults._cut_off,
    "stopped while listed": Faults._stop,
    "update": Faults.update,
    "other model": Faults._change_model,
    "scale up": Faults._scale_up,
    "scale down": Faults._scale_down,
    "lost for good": Faults._lose,
    "all replaced": Faults._replace_all,
    "dies in a row": Faults._die_in_a_row,
    "first blocks evicted": Faults._evict_first_blocks,
}
KINDS = tuple(_WORK)


def _evict_first_blocks(blocks: BlockManager) -> None:
    first = [block for block, each in blocks._contents.items() if each.parent is None]
    cached = [block for block in first if block in blocks._cached]
    for block in cached:
        blocks._cached.move_to_end(block, last=False)
    empty, blocks._free = blocks._free, deque()  # else these would be handed out
    taken = [blocks._take() for _ in cached]
    blocks._free = empty
    for block in taken:
        blocks._release(block)
