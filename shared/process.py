"""Runs a service in a fork, and another in its place if that dies.

Most of the startup time goes to imports: torch's alone take over a second. So the main process
imports everything, leaves the rest to a fork of itself, and waits: if that dies, another takes
milliseconds. It never runs gRPC or torch: threads and devices do not survive a fork.

Before large imports a service disables the garbage collector, which would walk over the imported
objects again and again, a tenth of the time, and find nothing. Forks enable it, with these objects
frozen: no collection of theirs looks at them.
"""

from __future__ import annotations

import asyncio
import gc
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

import structlog

from shared.config import ServiceSettings
from shared.logging import configure_logging
from shared.parent import end_with_parent

log = structlog.get_logger(__name__)

CANNOT_START = 2  # exit status for settings or a model that cannot work: retrying is useless
_TRIES = 3  # forks to try before giving up, once one was ready
_COMPANION_RETRY_S = 0.5
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


Settings = TypeVar("Settings", bound=ServiceSettings)
Ready = Callable[[], object]


def run_service(
    name: str,
    settings: Settings,
    serve: Callable[[Settings, Ready], Coroutine[Any, Any, None]],
    start_errors: tuple[type[Exception], ...] = (),
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
    companion: Callable[[Callable[[], None]], None] | None = None,
    **bound: object,
) -> int:
    """Runs `serve(settings, ready)` on an event loop, in a fork, until it ends.

    Args:
        name: of the service, added to its log lines, as is `bound`.
        serve: calls `ready`, once, when it is serving.
        start_errors: raised by `serve`, besides OSError, if it cannot start; logged as one line.
        companion: runs in a fork of its own, forked before the first that serves, which it
            outlives; another takes its place when it ends. It gets a function to call to show that
            it is alive.

    Returns:
        The exit status.
    """
    configure_logging(settings, name, **bound)
    if settings.exit_with_parent:
        end_with_parent()

    if companion is not None:
        _fork_companion(companion)

    expected: tuple[type[Exception], ...] = (OSError, *start_errors)

    def run(ready: Ready) -> None:
        try:
            with asyncio.Runner(loop_factory=loop_factory) as runner:
                runner.run(serve(settings, ready))
        except expected as error:
            log.error("cannot start", reason=str(error))
            sys.exit(CANNOT_START)

    return serve_with_successors(run)


def _fork_companion(companion: Callable[[Callable[[], None]], None]) -> None:
    """Keeps `companion` running in a fork of a fork of this process, until this process ends."""
    parent = os.getpid()
    gc.freeze()
    if os.fork():
        return
    end_with_parent(parent)
    while True:
        keeper = os.getpid()
        pid = os.fork()
        if not pid:
            end_with_parent(keeper)
            companion(lambda: None)
            os._exit(0)
        _, wait_status = os.waitpid(pid, 0)
        status = os.waitstatus_to_exitcode(wait_status)
        log.error("a companion died, and a fork takes its place", pid=pid, exit_status=status)
        time.sleep(_COMPANION_RETRY_S)


def serve_with_successors(serve: Callable[[Ready], None]) -> int:
    """Runs `serve` in a fork of this process, and once one was ready, in another whenever it dies.

    SIGTERM and SIGINT are passed on. No fork outlives this process.

    Args:
        serve: gets a function to call, once, when it is ready.

    Returns:
        The exit status of a fork that ended in order, was told to end or cannot start; or of the
        last one, if none, or none of the last few, was ever ready. If a signal killed it, that is
        128 plus its number.
    """
    pid, tries, told_to_end = 0, 1, False
    gc.freeze()
    woken, waking = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(waking)
    signal.signal(signal.SIGCHLD, _ignore)

    def pass_on(number: int, _: object) -> None:
        nonlocal told_to_end
        told_to_end = True
        with suppress(ProcessLookupError):  # it has just ended
            os.kill(pid, number)

    while True:
        keeper, (reading, writing) = os.getpid(), os.pipe()
        with _blocked():
            pid = os.fork()
            _handle_signals(pass_on if pid else signal.SIG_DFL)
        if not pid:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for descriptor in (reading, woken, waking):
                os.close(descriptor)
            end_with_parent(keeper)
            gc.enable()
            serve(partial(os.write, writing, b"."))
            return 0
        os.close(writing)
        wait_status = _wait_for(pid, woken)
        tries = _TRIES if os.read(reading, 1) else tries - 1
        os.close(reading)
        status = os.waitstatus_to_exitcode(wait_status)
        with _blocked():
            if status in (0, CANNOT_START) or told_to_end or not tries:
                return status if status >= 0 else 128 - status
            _handle_signals(signal.SIG_DFL)  # until there is another fork to pass them on to
        log.error("died, and a fork takes its place", pid=pid, exit_status=status)


def _wait_for(pid: int, woken: int) -> int:
    """Returns the wait status of a child once it has ended.

    Signals are handled in the meantime: each is a byte in the pipe `woken`. A blocking `waitpid`
    would sleep through one that arrives just before it.
    """
    while True:
        ended, wait_status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return wait_status
        select.select([woken], [], [])
        os.read(woken, 4096)


def _ignore(number: int, frame: object) -> None:
    """Does nothing, but Python notices only signals that have a handler."""


def _handle_signals(handler: Callable[[int, object], None] | signal.Handlers) -> None:
    for number in _SIGNALS:
        signal.signal(number, handler)


@contextmanager
def _blocked() -> Iterator[None]:
    """Keeps signals pending in the meantime."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
