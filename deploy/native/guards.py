"""Protects commands that change a stack from each other, and from signals where half of the work
would do harm."""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from deploy.errors import LaunchError
from deploy.stack import make_directory, open_file

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Lets one command at a time change a stack. Otherwise a second `up` would take the processes
    of the first one for leftovers.

    Raises:
        LaunchError: another command is changing the stack, or other users could.
    """
    make_directory(directory)
    with open(open_file(directory / "lock", os.O_WRONLY | os.O_CREAT), "wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise LaunchError(
                "PORT: another make up, scale or restart is changing its stack"
            ) from error
        yield


@contextmanager
def signals_interrupt() -> Iterator[None]:
    """Makes SIGTERM and SIGHUP act like Ctrl-C."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def ignore_signals() -> None:
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delays signals, as between a stop and its start: a stopped process would stay stopped."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
