"""The invariants of a simulated cluster: at each client's end, all the time, and at rest."""

from __future__ import annotations

import asyncio
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from frontend.engines.prefix_index import PrefixIndex
from frontend.engines.token_stream import TokenStream
from scheduler_svc.core.blocks.block_manager import BlockManager
from shared.errors import (
    DeadlineError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    QueueFullError,
    UnavailableError,
)
from tests.simulation.cluster.engines import Owner, owner_of
from tests.simulation.cluster.hosts import Host
from tests.simulation.cluster.requests import Client
from tests.simulation.cluster.world import World, virtual_deadlines

_STEADY_S = 1.0  # for which an engine has been there when its load is checked
_MANY = 8  # sequences
_SEEN_S = 0.1  # for which a frontend has known, so that it has acted on it
_OVERLAP_S = 0.5  # for which a completion may be at two engines, while messages are on their way
_PARTITIONED_S = 4.0  # the same limit where the network was partitioned


@asynccontextmanager
async def played(
    world: World,
    clients: Sequence[Client],
    faults: Awaitable[object],
    *,
    poll_s: float,
    rest_s: float,
    max_s: float | None = None,
) -> AsyncIterator[Watcher]:
    """Serves clients while faults happen, checks all of it, and yields at rest. Closes the world.

    Args:
        poll_s: the time between two checks of where completions are.
        rest_s: the time from the last end until nothing may be left.
    """
    with virtual_deadlines():
        watcher = Watcher(world)
        watching: asyncio.Future[Any] = asyncio.ensure_future(watcher.run(poll_s))
        serving: asyncio.Future[Any] = asyncio.gather(
            *(_serve(world, client) for client in clients), faults
        )
        both = [serving, watching]
        try:
            await asyncio.wait(both, timeout=max_s, return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                watching.result()
            assert serving.done(), f"requests do not end: {_open(world)}"
            serving.result()
            await asyncio.sleep(rest_s)
            _check_rest(world)
            yield watcher
        finally:
            watching.cancel()
            serving.cancel()
            await asyncio.wait(both)
            await world.close()


def _open(world: World) -> list[str]:
    return [
        f"{stream.request.request_id}/{stream.index} with {len(stream.tokens)} tokens at "
        f"{place.address} of frontend {frontend.number}"
        for frontend in world.frontends
        for place, engine in frontend.engines._engines.items()
        for stream in engine.open_streams()
    ]


async def _serve(world: World, client: Client) -> None:
    """Has a client send its request when it is time, and checks what it gets."""
    await asyncio.sleep(client.plan.at - world.loop.time())
    await client.run(world.frontends[client.plan.frontend].engines)
    world.ended.add(client.plan.number)
    _check_end(world, client)


def _check_end(world: World, client: Client) -> None:
    found = [_check_tokens(world, client, i, each) for i, each in enumerate(client.streams)]
    models = {model for model in found if model is not None}
    assert len(models) < 2, f"request {client.plan.number} is of models {models}"
    for index, stream in enumerate(client.streams):
        if stream.error is not None:
            _check_error(world, client, index, models)
    failed = any(stream.error for stream in client.streams)
    ended = all(stream.ended for stream in client.streams)
    assert ended or failed or client.left or client.error, f"{client.plan} has not ended"
    if client.error is not None:
        assert isinstance(client.error, InvalidArgumentError), client.error
        assert client.plan.engine, client.error


def _check_tokens(world: World, client: Client, index: int, stream: TokenStream) -> int | None:
    """Returns the model that the tokens are of."""
    if not stream.tokens:
        assert stream.finish is None
        return None
    for model in world.models:
        tokens, reason = client.plan.expected(model, index)
        if stream.tokens == tokens[: len(stream.tokens)]:
            assert stream.finish in (None, reason), f"{_name(client, index)}: {stream.finish}"
            if stream.finish is not None:
                assert stream.tokens == tokens, f"{_name(client, index)} ended early"
            return model
    raise AssertionError(f"{_name(client, index)}: {stream.tokens} are no model's tokens")


def _check_error(world: World, client: Client, index: int, models: set[int]) -> None:
    """Checks that an error is the right one."""
    now, plan, error = world.loop.time(), client.plan, client.streams[index].error
    name = f"{_name(client, index)}: {error!r} at {now:.2f} s with {world.described(plan.frontend)}"
    world.counts[type(error).__name__] += 1
    serving = [host for host in world.hosts if world.steady(plan.frontend, host)]
    if isinstance(error, DeadlineError):
        assert plan.timeout_s is not None, name
        assert now - client.submitted_at >= plan.timeout_s - 1e-6, name
    elif isinstance(error, QueueFullError):
        refused = world.refused[plan.number]
        assert len(set(refused)) == len(refused), f"{name}: asked {refused}"
        asked = {engine.name for engine in world.frontends[plan.frontend].steady(_SEEN_S)}
        asked = asked & {plan.engine} if plan.engine else asked
        assert asked <= set(refused), f"{name}: refused by {refused}"
    elif isinstance(error, UnavailableError) and not models:  # its engine did not recover
        assert plan.engine or not serving, name
    elif isinstance(error, FailedPreconditionError | UnavailableError):
        assert models, name
        assert not models & {host.served_model for host in serving}, name
    elif isinstance(error, InternalError):
        if not any(plan.is_deadly(each) for each in world.models):
            assert world.losses.convict(Owner(plan.number, index)), name
            world.counts["convicted by chance"] += 1
    else:
        raise AssertionError(name)


def _name(client: Client, index: int) -> str:
    return f"request {client.plan.number}, completion {index}"


class Watcher:
    """Checks all the time where completions are."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._wrong_since: dict[Owner, float] = {}
        self.imbalances: list[
            float
        ] = []  # most sequences of an engine, by the mean if that is many

    async def run(self, every_s: float) -> None:
        while True:
            self._poll()
            await asyncio.sleep(every_s)

    def _poll(self) -> None:
        world, now = self._world, self._world.loop.time()
        places: dict[Owner, list[Host]] = {}
        for host in world.hosts:
            for seq in host.sequences():
                places.setdefault(owner_of(seq), []).append(host)
        ended = world.ended
        wrong = {o: at for o, at in places.items() if len(at) > 1 or o.request in ended}
        self._wrong_since = {o: self._wrong_since.get(o, now) for o in wrong}
        for owner, since in self._wrong_since.items():
            cut_at = max(host.cut_at for host in wrong[owner])
            if now - since > _OVERLAP_S and now - cut_at > _PARTITIONED_S:
                names = [host.name for host in wrong[owner]]
                raise AssertionError(f"{owner} is at {names}, and has been since {since:.2f} s")
        steady = [h for h in world.hosts if h.serving and now - h.changed_at > _STEADY_S]
        if steady:
            self._note_balance([len(host.sequences()) for host in steady])

    def _note_balance(self, counts: list[int]) -> None:
        mean = sum(counts) / len(counts)
        if mean >= _MANY:
            self.imbalances.append(max(counts) / mean)


def _check_rest(world: World) -> None:
    """Checks that nothing is left of any request, and that frontends know what engines hold."""
    for host in world.hosts:
        assert not host.sequences(), f"{host.name} has {[*map(owner_of, host.sequences())]}"
        if host.process is not None:
            scheduler = host.process.scheduler
            scheduler.check_integrity()
            blocks = scheduler.blocks
            assert blocks.num_free_blocks == blocks.num_blocks, f"{host.name}: blocks in use"
    for frontend in world.frontends:
        engines = frontend.engines
        assert frontend.ready == engines.serving == any(host.serving for host in world.hosts)
        for index in engines._indexes.values():
            assert not index._pending, f"pending: {index._pending}"
        for place, engine in engines._engines.items():
            assert not engine.num_open, f"{engine.open_streams()} at {place}"
            unstarted = engine.load.unstarted_tokens
            assert not unstarted, f"{unstarted} tokens are to be computed at {place}"
            assert not engine.ledger._num_unstarted, f"requests are to begin at {place}"
        known = {place.address for place in engines._engines}
        listed = {host.address for host in world.hosts if host.listed}
        assert known == listed, f"knows {known} of {listed}"
        _check_indexes(world, frontend.number)


def _check_indexes(world: World, number: int) -> None:
    engines = world.frontends[number].engines
    by_place = {place.address: engine for place, engine in engines._engines.items()}
    holders: Counter[int] = Counter()
    for host in world.hosts:
        engine = by_place.get(host.address)
        if engine is None or host.process is None or len(engines._tasks[engine]) == 1:
            continue
        assert engine.connected, f"no connection to {host.name}"
        index = engine.index
        assert index is not None, f"frontend {number} does not know what {host.name} holds"
        orphans = check_index(index, engine.number, host.process.scheduler.blocks)
        world.counts["blocks without the one before them"] += orphans
        for name in index._names.get(engine.number, {}).values():
            holders[name] |= 1 << engine.number
    for index in engines._indexes.values():
        assert index._holders == dict(holders), "holders of blocks"


def check_index(index: PrefixIndex, number: int, blocks: BlockManager) -> int:
    """Checks that an index has exactly what is held by the engine that has a number there; returns
    how many of these blocks are orphans."""
    names = index._names.get(number, {})
    orphans = set(index._orphans[number]._parents) if number in index._orphans else set()
    assert names.keys().isdisjoint(orphans), "a block is named, and an orphan"
    held = {each.name: each for each in blocks._contents.values()}
    assert names.keys() | orphans == held.keys(), (
        f"knows {len(names)} + {len(orphans)} of {len(held)} blocks of engine {number}"
    )
    for name, block in held.items():
        chain = [block]
        while chain[-1].parent in held:
            chain.append(held[chain[-1].parent])
        if not chain[-1].parent:
            assert name in names, "a block is an orphan, though its parent is there"
            ids = array("I")
            for each in reversed(chain):
                ids.frombytes(each.token_ids)
            ids.append(0)
            assert names[name] == index.names_of(ids, block.cache_salt)[-1], "a wrong name"
    return len(orphans)
