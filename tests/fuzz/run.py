"""Fuzzes one service: its messages, then the layers below them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from frontend.api.servicer import SERVICE_NAME
from tests.fuzz import engine, frontend, http, scheduler, transport, worker
from tests.fuzz.stack import running_target
from tests.fuzz.tally import Tally

Tallies = dict[str, Tally]  # by the folder of the corpus to which their cases belong


async def _frontend(directory: Path, count: int, seed: int) -> Tallies:
    with running_target(directory) as target:
        tallies = {
            "frontend": await frontend.fuzz(target, count, seed),
            "engine": await engine.fuzz(target, count, seed),
            "http": await http.fuzz(target, count, seed),
        }
        tally = tallies["frontend"]
        await transport.fuzz(target.stack.address, SERVICE_NAME, "GetModel", seed, tally)
        await target.check_rest(tally)
        return tallies


async def _scheduler(directory: Path, count: int, seed: int) -> Tallies:
    async with scheduler.running_scheduler(directory) as target:
        tally = await scheduler.fuzz(target, count, seed)
        await transport.fuzz(target.address, scheduler.SERVICE, "GetLoad", seed, tally)
        await target.load()
        return {"scheduler": tally}


async def _worker(directory: Path, count: int, seed: int) -> Tallies:
    async with worker.running_worker(directory) as target:
        tally = await worker.fuzz(target, count, seed)
        await transport.fuzz(target.address, worker.SERVICE, "GetInfo", seed, tally)
        await target.configure()
        return {"worker": tally}


# Each starts a service, with sockets in a directory, and sends it this many messages at each of its
# interfaces, drawn from a seed.
SERVICES: dict[str, Callable[[Path, int, int], Awaitable[Tallies]]] = {
    "frontend": _frontend,
    "scheduler": _scheduler,
    "worker": _worker,
}
