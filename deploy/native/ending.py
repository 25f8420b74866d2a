"""Ends processes in order, and waits for their ends."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial

import psutil

from deploy.stack import SERVICES

KILL_AFTER_S = 5.0  # beyond a service's own grace period
_POLL_S = 0.02


def end_in_order(
    running: Mapping[str, psutil.Process],
    limit_s: float,
    deadline: float = float("inf"),
    terminate: Callable[[str], object] | None = None,
) -> None:
    """Ends these processes, one service at a time. Kills those that do not end within `limit_s`
    seconds, or by the `deadline`.

    Args:
        terminate: tells a process to end, by name. None: sends SIGTERM.
    """
    for service in reversed(SERVICES):
        chosen = {name: running[name] for name in running if name.rpartition("-")[0] == service}
        for name, process in chosen.items():
            send(partial(terminate, name) if terminate else process.terminate)
        if not wait_ended(chosen.values(), min(limit_s, deadline - time.monotonic())):
            for process in chosen.values():
                send(process.kill)
            wait_ended(chosen.values(), KILL_AFTER_S)


def wait_ended(processes: Iterable[psutil.Process], limit_s: float) -> bool:
    """Waits at most `limit_s` seconds; returns whether all these processes have ended."""
    deadline = time.monotonic() + limit_s
    while any(map(is_alive, processes)):
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def own_processes() -> Iterator[psutil.Process]:
    """Yields the processes of this user, whatever started them. A zombie has no environment."""
    # psutil remembers the processes of the last call, even if a pid was reused since.
    psutil.process_iter.cache_clear()
    for process in psutil.process_iter():
        # Real, effective and saved: a program that another user starts may have this effective
        # user.
        with suppress(psutil.Error):
            if {*process.uids()} == {os.geteuid()}:
                yield process


def is_alive(process: psutil.Process) -> bool:
    """Whether a process runs; a zombie has ended."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def send(signal: Callable[[], object]) -> None:
    """Sends a signal to a process, unless that has ended."""
    with suppress(psutil.NoSuchProcess):
        signal()
