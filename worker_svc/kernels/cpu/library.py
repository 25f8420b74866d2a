"""Loads the C++ library of the CPU kernels, and keeps the teams of threads that run them.

A kernel's call is `library().nano_KERNEL(*team(), arguments)`.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
import weakref
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import structlog

from worker_svc.errors import StartError
from worker_svc.kernels.cpu.build import PREBUILT, build, choose_variant, find, opened
from worker_svc.kernels.cpu_features import num_cores
from worker_svc.user_cache import DamagedError, cache_folder

log = structlog.get_logger(__name__)


@cache
def library() -> ctypes.CDLL:
    """The library for this machine's CPU. Compiles it if neither `make setup`, the build of an
    image nor an earlier start has.

    Raises:
        StartError: it cannot be compiled or loaded.
    """
    variant = choose_variant()
    loaded = _load_from(PREBUILT, variant) or _load_or_compile(variant)
    loaded.nano_team_create.restype = ctypes.c_void_p
    return loaded


def preload() -> None:
    """Loads the library if it has been compiled. All forks of this process then have this library,
    also after its sources have changed."""
    with suppress(OSError, StartError):
        found = [find(base, choose_variant()) for base in (PREBUILT, cache_folder("kernels"))]
        if first := next(filter(None, found), None):
            with opened(first):  # else a fork makes it again
                library()


def _load_from(base: Path, variant: str) -> ctypes.CDLL | None:
    path = find(base, variant)
    if path is None:
        return None
    try:
        return _load(path)
    except OSError as error:
        log.warning("compiled CPU kernels cannot be used", path=str(path), reason=str(error))
        damaged = isinstance(error, DamagedError)
        with suppress(OSError, StartError):
            if damaged or base != PREBUILT:  # others may still be able to use that
                path.unlink(missing_ok=True)
            if damaged:
                return _compile(base, variant)
        return None


def _load(path: Path) -> ctypes.CDLL:
    """
    Raises:
        OSError: the file cannot be loaded, is damaged, or other users may write to it.
    """
    with opened(path) as number:
        # The path may lead to another file by now. The descriptor stays open, because the loader
        # takes a later library of an equal name for this one.
        kept = os.dup(number)
        try:
            return ctypes.CDLL(f"/proc/self/fd/{kept}")
        except OSError:
            os.close(kept)
            raise


def _load_or_compile(variant: str) -> ctypes.CDLL:
    try:
        kept = cache_folder("kernels")
        return _load_from(kept, variant) or _compile(kept, variant)
    except OSError as error:
        log.warning(
            "compiled CPU kernels are not kept; each start compiles again", reason=str(error)
        )
    try:
        with TemporaryDirectory() as folder:
            return _compile(Path(folder), variant)
    except OSError as error:
        raise StartError(f"the CPU kernels cannot be compiled or loaded: {error}") from error


def _compile(base: Path, variant: str) -> ctypes.CDLL:
    log.info("compiling the CPU kernels", variant=variant, folder=str(base))
    started = time.monotonic()
    (path,) = build(base, [variant])
    loaded = _load(path)
    log.info("compiled the CPU kernels", seconds=round(time.monotonic() - started, 1))
    return loaded


class _Team:
    """Threads of this process that run kernels together with their caller."""

    def __init__(self, size: int) -> None:
        self.pid, self.size = os.getpid(), size
        self.address = ctypes.c_void_p(library().nano_team_create(size))
        destroyed = weakref.finalize(self, _destroy, self.pid, self.address)
        destroyed.atexit = False  # another thread may still be in a step


def _destroy(pid: int, address: ctypes.c_void_p) -> None:
    if os.getpid() == pid:  # a fork has no threads but its own
        library().nano_team_destroy(address)


class _Calls(threading.local):
    """A thread's team, and how many of its members run a kernel."""

    members = 0  # of the next runs; 0: a thread per core
    team: _Team | None = None


_calls = _Calls()


def set_threads(members: int) -> None:
    """Sets how many threads run the kernels that the calling thread calls. By default it is a
    thread per core."""
    if members < 1:
        raise ValueError(f"members: {members} is less than 1")
    _calls.members = members


def team() -> tuple[ctypes.c_void_p, int]:
    """The address of the calling thread's team, and how many of its members run the next kernel."""
    if not _calls.members:
        _calls.members = num_cores()
    mine = _calls.team
    if mine is None or mine.size < _calls.members or mine.pid != os.getpid():
        mine = _calls.team = _Team(_calls.members)
    return mine.address, _calls.members
