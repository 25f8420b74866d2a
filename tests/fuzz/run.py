"""Fuzzes one service, its messages, then the layers below them, or a stack of processes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from tests.fuzz import engine, frontend, http, processes, scheduler, transport, worker
from tests.fuzz.stack import SERVICE, running_stack
from tests.fuzz.tally import Tally


async def _frontend(directory: Path, count: int, seed: int) -> Tally:
    async with running_stack(directory) as stack:
        tally = await frontend.fuzz(stack, count, seed)
        await transport.fuzz(stack.address, SERVICE, "GetModel", seed, tally)
        if not await stack.completion():
            tally.problem("no completion", "hostile connections")
        return tally


async def _engine(directory: Path, count: int, seed: int) -> Tally:
    async with running_stack(directory) as stack:
        return await engine.fuzz(stack, count, seed)


async def _scheduler(directory: Path, count: int, seed: int) -> Tally:
    async with scheduler.running_scheduler(directory) as target:
        tally = await scheduler.fuzz(target, count, seed)
        await transport.fuzz(target.address, scheduler.SERVICE, "GetLoad", seed, tally)
        await target.load()
        return tally


async def _worker(directory: Path, count: int, seed: int) -> Tally:
    async with worker.running_worker(directory) as target:
        tally = await worker.fuzz(target, count, seed)
        await transport.fuzz(target.address, worker.SERVICE, "GetInfo", seed, tally)
        await target.configure()
        return tally


# Each starts a service in this process, with sockets in a directory, or processes of its own, and
# sends it this many messages, drawn from a seed.
SERVICES: dict[str, Callable[[Path, int, int], Awaitable[Tally]]] = {
    "frontend": _frontend,
    "engine": _engine,
    "scheduler": _scheduler,
    "worker": _worker,
    "processes": processes.fuzz,
    "http": http.fuzz,
}
