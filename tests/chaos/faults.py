"""The faults of a campaign. Each is a function that returns once the harm is done; afterwards the
stack recovers, or the fault undoes itself."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from pathlib import Path

import grpc

from nano_vllm_grpc import AsyncLLM
from nano_vllm_grpc.errors import LLMError
from nano_vllm_grpc.types import SamplingParams
from tests.chaos.workload import Request
from tests.faults.faulty_services.sitecustomize import TRIGGER
from tests.stack import RealStack

_CANCELLED_AT_ONCE = 200
_STALLED = 8


class Target:
    """A stack, and the means to harm it."""

    def __init__(
        self, stack: RealStack, cache_dir: Path, requests: list[Request], rng: random.Random
    ) -> None:
        self.stack = stack
        self.cache_dir = cache_dir
        self.rng = rng
        self.requests = requests

    async def kill(self, service: str) -> None:
        """Kills any process of a service with SIGKILL."""
        await asyncio.to_thread(self.stack.kill, service, self.any_index(service))

    async def restart(self, service: str) -> None:
        """Sends SIGTERM: the process ends in an orderly way, and the supervisor starts another."""
        await asyncio.to_thread(self.stack.terminate, service, self.any_index(service))

    async def suspend(self, service: str) -> None:
        """Stops a process for a while; whoever finds it hung may replace it in the meantime."""
        pid = await asyncio.to_thread(self.stack.stop, service, self.any_index(service))
        await asyncio.sleep(self.rng.uniform(0.5, 5.0))
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    async def cancel_many(self) -> None:
        """Opens many streams and cancels all of them at once."""
        async with AsyncLLM(self.stack.address) as client:
            streams = [
                client.stream(r.prompt, r.params) for r in self._any_requests(_CANCELLED_AT_ONCE)
            ]
            tasks = [asyncio.ensure_future(anext(stream, None)) for stream in streams]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for stream in streams:
                await stream.aclose()

    async def stall_readers(self) -> None:
        """Opens streams whose readers stop after one chunk, and leave later."""

        async def stall(client: AsyncLLM, request: Request) -> None:
            async with aclosing(client.stream(request.prompt, request.params)) as chunks:
                await anext(chunks, None)
                await asyncio.sleep(self.rng.uniform(1.0, 3.0))

        async with AsyncLLM(self.stack.address) as client:
            await asyncio.gather(*(stall(client, r) for r in self._any_requests(_STALLED)))

    async def poison(self) -> None:
        """Sends a request that kills any worker, every time, until it alone ends with INTERNAL."""
        params = SamplingParams(temperature=0, max_tokens=20)
        async with AsyncLLM(self.stack.address) as client:
            try:
                async for _ in client.stream([*range(100, 136), *TRIGGER], params):
                    pass
            except LLMError as error:
                if error.code is not grpc.StatusCode.INTERNAL:
                    raise
            else:
                raise AssertionError("a poisoned request was answered")

    async def damage_blocks(self) -> None:
        """Damages files of the directory under the cache."""
        damage_blocks(self.cache_dir, self.rng)

    def any_index(self, service: str) -> int:
        return self.rng.randrange(self.stack.stack.count(service))

    def _any_requests(self, count: int) -> list[Request]:
        return self.rng.choices(self.requests, k=count)


def damage_blocks(cache_dir: Path, rng: random.Random) -> None:
    """Flips a bit in a third of the files, cuts off another third and deletes some of the rest."""
    for path in sorted(each for each in cache_dir.rglob("*") if each.is_file()):
        with suppress(FileNotFoundError):  # it was evicted
            size, kind = path.stat().st_size, rng.randrange(6)
            if kind < 2 and size:
                with path.open("r+b") as file:
                    place = rng.randrange(size)
                    byte = os.pread(file.fileno(), 1, place)[0] ^ (1 << rng.randrange(8))
                    os.pwrite(file.fileno(), bytes([byte]), place)
            elif kind < 4 and size:
                os.truncate(path, rng.randrange(size))
            elif kind == 4:
                path.unlink()


async def _kill_two(target: Target) -> None:
    first, second = target.rng.sample(["worker", "scheduler", "frontend"], 2)
    await target.kill(first)
    await asyncio.sleep(target.rng.choice([0.0, 0.3]))
    await target.kill(second)


async def _kill_worker_twice(target: Target) -> None:
    """Kills a worker, and once more while one starts."""
    await target.kill("worker")
    await asyncio.sleep(target.rng.uniform(0.0, 2.0))
    await target.kill("worker")


Fault = Callable[[Target], Awaitable[None]]

# By name, with its weight in random draws.
FAULTS: dict[str, tuple[int, Fault]] = {
    "worker killed": (6, lambda target: target.kill("worker")),
    "scheduler killed": (6, lambda target: target.kill("scheduler")),
    "frontend killed": (6, lambda target: target.kill("frontend")),
    "worker stopped": (3, lambda target: target.suspend("worker")),
    "scheduler stopped": (1, lambda target: target.suspend("scheduler")),
    "worker restarted": (2, lambda target: target.restart("worker")),
    "scheduler restarted": (2, lambda target: target.restart("scheduler")),
    "frontend restarted": (2, lambda target: target.restart("frontend")),
    "two killed": (2, _kill_two),
    "worker killed twice": (2, _kill_worker_twice),
    "mass cancel": (2, lambda target: target.cancel_many()),
    "stalled readers": (2, lambda target: target.stall_readers()),
    "blocks damaged": (2, lambda target: target.damage_blocks()),
    "poisoned request": (2, lambda target: target.poison()),
    "none": (2, lambda target: asyncio.sleep(1.0)),  # for comparison
}


def draw_faults(rng: random.Random, count: int, kinds: Sequence[str] = ()) -> list[str]:
    """Draws names of faults, of these kinds or of all. Every kind comes once before any comes
    twice, if `count` allows."""
    names = list(kinds or FAULTS)
    drawn = rng.sample(names, len(names))
    drawn += rng.choices(names, [FAULTS[name][0] for name in names], k=count)
    return drawn[:count]
