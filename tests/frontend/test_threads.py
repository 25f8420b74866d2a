"""The order in which threads run the jobs of several callers."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from frontend.callers.call import CALL, Call
from frontend.callers.tenants import Tenant
from frontend.text.threads import FairThreads
from frontend.text.tokenizer import Tokenizer

TIMEOUT_S = 60


@pytest.fixture
def threads() -> Iterator[FairThreads]:
    threads = FairThreads(1, "test")
    yield threads
    threads.close()


def begin(threads: FairThreads, caller: str, work: Callable[[], Any]) -> asyncio.Task[Any]:
    return asyncio.create_task(threads.run(caller, work))


async def test_callers_take_turns(threads: FairThreads) -> None:
    gate, order = threading.Event(), []
    jobs = [begin(threads, "first", lambda: gate.wait(TIMEOUT_S))]
    for number in range(1000):
        jobs.append(begin(threads, "flood", lambda number=number: order.append(f"flood {number}")))
    await asyncio.sleep(0)
    for caller in ("a", "b", "a"):
        jobs.append(begin(threads, caller, lambda caller=caller: order.append(caller)))
    await asyncio.sleep(0)
    gate.set()
    await asyncio.wait_for(asyncio.gather(*jobs), TIMEOUT_S)
    assert order[:6] == ["flood 0", "a", "b", "flood 1", "a", "flood 2"]
    assert len(order) == 1003


async def test_an_error_goes_to_its_caller(threads: FairThreads) -> None:
    with pytest.raises(ZeroDivisionError):
        await threads.run("a", lambda: 1 // 0)
    assert await threads.run("a", lambda: 1) == 1


async def test_cancelled_jobs_are_dropped_at_once(threads: FairThreads) -> None:
    gate = threading.Event()
    running = begin(threads, "a", lambda: gate.wait(TIMEOUT_S))
    works = [Work() for _ in range(3)]
    left = [weakref.ref(work) for work in works]
    jobs = [begin(threads, caller, works.pop()) for caller in "aab"]
    await asyncio.sleep(0)
    for job in jobs:
        job.cancel()
    await asyncio.gather(*jobs, return_exceptions=True)
    del job, jobs
    await asyncio.sleep(0)
    assert [each() for each in left] == [None] * 3
    running.cancel()  # its work continues, and the next job waits for its thread
    gate.set()
    assert await threads.run("b", lambda: 1) == 1


class Work:
    def __call__(self) -> None: ...


async def test_a_clients_thousand_texts_delay_another_client_by_one_per_thread(demo: Path) -> None:
    tokenizer = Tokenizer(demo, threads=1)
    order: list[str] = []
    gate = threading.Event()

    async def call(name: str, work: asyncio.Future[None] | None = None) -> None:
        CALL.set(Call("Tokenize", "unix:", Tenant(name)))
        await tokenizer.on_thread(lambda: gate.wait(TIMEOUT_S) if name == "first" else None)
        order.append(name)

    names = ["first", *["flood"] * 1000, "other"]
    jobs = [asyncio.create_task(call(name)) for name in names]
    await asyncio.sleep(0)
    gate.set()
    await asyncio.wait_for(asyncio.gather(*jobs), TIMEOUT_S)
    assert order.index("other") <= 2
    tokenizer.close()
