"""Hosts, frontends and the network between them."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest import mock

from frontend.engines.engine import EngineClient
from frontend.engines.placement import _MIN_IMBALANCE
from frontend.engines.pool import Engines
from frontend.engines.token_stream import TokenStream
from frontend.request import GenerationRequest
from shared.errors import QueueFullError
from tests.simulation.cluster.engines import Owner, Process, Shape
from tests.simulation.cluster.hosts import Host
from tests.simulation.cluster.losses import FRONTENDS, Losses
from tests.simulation.cluster.network import Dialer, Link
from tests.simulation.cluster.requests import MAX_COMPLETIONS

_MAX_FACTOR = 2  # of an engine's sequences and the mean
LIST_SEEN_S = 0.5  # after which every frontend has seen the list
KNOWN_S = 3.0  # after which every frontend knows of a change, a partition's included


@contextmanager
def virtual_deadlines() -> Iterator[None]:
    """Lets frontends measure deadlines by the event loop's time."""
    clock = SimpleNamespace(monotonic=asyncio.get_running_loop().time)
    with (
        mock.patch("frontend.engines.engine.time", clock),
        mock.patch("frontend.engines.messages.time", clock),
        mock.patch("frontend.engines.outputs.time", clock),
    ):
        yield


class _CountingEngines(Engines):
    """Counts what it moves, and notes when engines were last ready or not any more."""

    counts: Counter[str]
    changed_at: dict[EngineClient, float]

    world: World
    number: int

    def submit(self, request: GenerationRequest) -> list[TokenStream]:
        began = time.thread_time()
        try:
            streams = super().submit(request)
        except QueueFullError:
            assert request.engine or not self.serving, "rejected without asking the engines"
            raise
        self.world.routing_cpu_s.append(time.thread_time() - began)
        if not request.engine:
            (engine,) = [e for e in self._engines.values() if e.has(streams[0])]
            self.world.check_placement(self.number, engine)
        return streams

    async def _on_engine_ready(self, engine: EngineClient, ready: bool) -> None:
        self.changed_at[engine] = asyncio.get_running_loop().time()
        await super()._on_engine_ready(engine, ready)

    def _move(self, engine: EngineClient, streams: Sequence[TokenStream]) -> None:
        number = streams[0].number
        super()._move(engine, streams)
        if streams[0].number != number:
            self.counts["moves"] += 1
            self.counts["moves with tokens"] += bool(streams[0].tokens)


class Frontend:
    """A frontend's engines, and the links to them."""

    def __init__(self, number: int, world: World, start_s: float) -> None:
        self.number = number
        self.links: dict[str, Link] = {}
        self.ready = False
        self._world = world
        self._start_s = start_s
        dialer: Any = Dialer(self._reach)
        self.engines = _CountingEngines([f"file:{world.list_file}"], self._on_ready, dialer)
        self.engines.world, self.engines.number = world, number
        self.engines.counts = world.counts
        self.engines.changed_at = {}
        self._task = asyncio.ensure_future(self._run())

    def link(self, address: str) -> Link:
        if address not in self.links:
            rng, on_lost = Random(self._world.rng.random()), partial(self._note_loss, address)
            self.links[address] = Link(rng, self._world.delays, on_lost)
        return self.links[address]

    def steady(self, seconds: float) -> list[EngineClient]:
        """The engines that have been serving for so long, as it knows."""
        then = asyncio.get_running_loop().time() - seconds
        changed_at = self.engines.changed_at
        engines = self.engines._engines.values()
        return [each for each in engines if each.serving and changed_at[each] < then]

    def _note_loss(self, address: str, process: Process) -> None:
        """Notes the completions that may count a lost connection: all that are at an engine, unless
        it has said that it stops."""
        for place, engine in self.engines._engines.items():
            if place.address == address and engine.connected and not engine.draining:
                tokens = {
                    Owner(int(stream.request.request_id), stream.index): len(stream.tokens)
                    for stream in engine.open_streams()
                }
                self._world.losses.add(FRONTENDS, tokens, process.held)

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])
        if not self._task.cancelled() and (error := self._task.exception()):
            raise error

    async def _run(self) -> None:
        await asyncio.sleep(self._start_s)
        await self.engines.run()

    async def _on_ready(self, ready: bool) -> None:
        assert ready is not self.ready, "the state is reported twice"
        self.ready = ready

    def _reach(self, address: str) -> tuple[Link, Host]:
        return self.link(address), self._world.host(address)


class World:
    """Use it within `virtual_deadlines`."""

    def __init__(
        self,
        rng: Random,
        directory: Path,
        *,
        num_frontends: int,
        models: Sequence[int],
        delays: Callable[[], float],
        poison_back_s: Callable[[int], float],
    ) -> None:
        """`poison_back_s`: gives the seconds until what a kind of poison took down is back."""
        self.rng = rng
        self.loop = asyncio.get_running_loop()
        self.models = models
        self.delays = delays
        self.list_file = directory / "engines"
        self.hosts: list[Host] = []
        self.counts: Counter[str] = Counter()
        self.routing_cpu_s: list[float] = []  # of each request
        self.ended: set[int] = set()  # requests
        self.refused: dict[int, list[str]] = {}  # names of engines, by request
        self.losses = Losses()
        self.taken_down: dict[int, list[str]] = {}  # names of engines, by poisonous request
        self._poison_back_s = poison_back_s
        self._write_list()
        self.frontends = [
            Frontend(number, self, rng.uniform(0, 0.2)) for number in range(num_frontends)
        ]

    def add_host(self, shape: Shape, model: int) -> Host:
        name = f"engine-{len(self.hosts)}"
        host = Host(name, shape, model, self)
        self.hosts.append(host)
        host.start()
        self.set_listed([host])
        return host

    def host(self, address: str) -> Host:
        return next(host for host in self.hosts if host.address == address)

    def set_listed(self, hosts: Sequence[Host], listed: bool = True) -> None:
        """Puts hosts on the list of engines, or takes them off it."""
        for host in hosts:
            if host.listed is not listed:
                host.listed = listed
                host.changed()
        self._write_list()

    def is_cut(self, frontend: int, host: Host) -> bool:
        return self.frontends[frontend].link(host.address).is_cut

    def check_placement(self, frontend: int, engine: EngineClient) -> None:
        """Checks that an engine which is given a new request serves, if any does."""
        (host,) = [each for each in self.hosts if each.name == engine.name]
        reachable_since = KNOWN_S + (
            self.loop.time() if self.is_cut(frontend, host) else host.cut_at
        )
        known_at = max(reachable_since, LIST_SEEN_S + host.changed_at)
        if host.process is not None and not host.serving and self.loop.time() > known_at:
            others = self.frontends[frontend].steady(LIST_SEEN_S)
            assert not others, f"{host.name} gets a request but does not serve"
        self._check_balance(frontend, engine)

    def _check_balance(self, frontend: int, chosen: EngineClient) -> None:
        """Checks that others do not have much less. What frontends have sent at the same time they
        do not know of each other."""
        counts = {engine.name: 0 for engine in self.frontends[frontend].steady(0.0)}
        for each in self.frontends:
            for engine in each.engines._engines.values():
                if engine.name in counts:
                    counts[engine.name] += engine.num_open
        if chosen.name in counts:
            mean = sum(counts.values()) / len(counts)
            most = _MAX_FACTOR * mean + len(self.frontends) * (_MIN_IMBALANCE + MAX_COMPLETIONS)
            assert counts[chosen.name] <= most, f"one more goes to {chosen.name}: {counts}"

    def steady(self, frontend: int, host: Host) -> bool:
        """Whether an engine has been serving for so long that a frontend knows."""
        known = self.loop.time() - max(host.changed_at, host.cut_at) > KNOWN_S
        return known and host.serving and not self.is_cut(frontend, host)

    def cut(self, frontend: Frontend, host: Host) -> None:
        link = frontend.link(host.address)
        if not link.is_cut:
            self.counts["partitions"] += 1
            host.cut_at = self.loop.time()
            link.cut()

    def heal(self, frontend: Frontend, host: Host) -> None:
        host.changed()
        host.cut_at = self.loop.time()
        frontend.link(host.address).heal()

    def described(self, frontend: int) -> str:
        """Says what engines there are, and how a frontend sees them."""
        engines = self.frontends[frontend].engines._engines
        seen = {
            place.address: f"{'serving' if engine.serving else 'not serving'}, "
            f"{'drained' if engine.is_drained else 'not drained'}, "
            f"{engine.num_open} open"
            for place, engine in engines.items()
        }
        return "; ".join(
            f"{host.name} with model {host.served_model}, {'' if host.serving else 'not '}serving "
            f"since {host.changed_at:.2f} s: {seen.get(host.address, 'unknown')}"
            for host in self.hosts
        )

    async def close(self) -> None:
        for frontend in self.frontends:
            await frontend.close()
        for host in self.hosts:
            host.kill()
        for _ in range(5):  # what was cancelled ends
            await asyncio.sleep(0)

    def _write_list(self) -> None:
        lines = [host.address for host in self.hosts if host.listed]
        self.list_file.write_text("\n".join(lines), encoding="utf-8")

    def take_down(self, request: int, kind: int, host: Host) -> float:
        """Notes that a request of a kind of `POISONS` takes down a host's workers or scheduler.
        Returns the seconds until those are back."""
        self.taken_down.setdefault(request, []).append(host.name)
        self.counts["poisonings"] += 1
        host.changed()
        return self._poison_back_s(kind)

    def refuse(self, request: int, host: Host) -> None:
        """Notes that an engine has no room for a request."""
        self.refused.setdefault(request, []).append(host.name)
        self.counts["refusals"] += 1
