"""asyncio without waiting: when nothing is ready to run, the clock jumps to the next timer."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


class DeadlockError(AssertionError):
    """Everything waits and no timer is set: nothing will ever happen again."""


class _Selector(selectors.SelectSelector):
    """Lets time pass instead of waiting; no I/O ever happens."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise DeadlockError("everything is waiting, and no timer is set")
        self.now += timeout
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose `time()` begins at 0 and advances only to timers."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Like `asyncio.run`, but in virtual time. An error of a callback, which asyncio would only
    log, is raised as well."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(_until_failure(coroutine))


async def _until_failure(coroutine: Coroutine[Any, Any, T]) -> T:
    loop = asyncio.get_running_loop()
    failed: asyncio.Future[T] = loop.create_future()

    def fail(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if not failed.done():
            failed.set_exception(context.get("exception") or AssertionError(context["message"]))

    loop.set_exception_handler(fail)
    running = asyncio.ensure_future(coroutine)
    await asyncio.wait([running, failed], return_when=asyncio.FIRST_COMPLETED)
    try:
        return (failed if failed.done() else running).result()
    finally:
        running.cancel()
        failed.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await running
