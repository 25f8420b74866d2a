"""Kernels that numba compiles, and whose machine code is kept in the user's cache directory.

Numba would keep it per checkout, and not compile a function again if only another that it calls
has changed. The folder is therefore named after the content of all sources. Whoever writes to it
runs code here (the files hold pickles and machine code), so it has to be this user's alone.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import llvmlite
import numba
import numpy as np
import structlog
from numba.core.caching import CompileResultCacheImpl, FunctionCache, NullCache, _CacheLocator

from worker_svc.user_cache import cache_folder, private_folder

log = structlog.get_logger(__name__)

_KEPT = 8  # folders; other checkouts and branches have theirs
_COMPILATION_S = 60.0  # at most, of one kernel; waiting longer would be for a stopped process
_POLL_S = 0.05


def kernel(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """`numba.njit` with these options; a later process loads what this one compiles."""

    def decorate(function: Callable[..., Any]) -> Any:
        dispatcher = numba.njit(**options)(function)
        dispatcher._cache = _KernelCache(function)  # as `cache=True` does
        return dispatcher

    return decorate


def _digest(here: Path) -> str:
    digest = hashlib.sha256(f"{numba.__version__} {llvmlite.__version__} {np.__version__}".encode())
    for path in [*sorted(here.parent.glob("*.py")), *sorted(here.rglob("*.py"))]:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:32]


def _choose_folder() -> Path | None:
    """In $NUMBA_CACHE_DIR if that is set; None if the user has no home."""
    try:
        base = Path(numba.config.CACHE_DIR or cache_folder("numba"))
    except OSError:
        return None
    return base / _digest(Path(__file__).parent)


_FOLDER = _choose_folder()


@cache
def _folder() -> Path | None:
    """Makes the folder if it is missing; None if there can be none, or others may write to it."""
    try:
        if _FOLDER is None:
            raise FileNotFoundError("the user has no home")
        is_new = not _FOLDER.exists()
        with private_folder(_FOLDER, create=True) as number, suppress(OSError):
            os.utime(number)  # used last, dropped last
    except OSError as error:
        log.warning("compiled kernels are not kept", path=str(_FOLDER), reason=str(error))
        return None
    if is_new:
        _drop_old(_FOLDER.parent)
    return _FOLDER


def _drop_old(base: Path) -> None:
    """Removes all folders but the newest. A process that uses one compiles again, and makes it
    anew."""
    with suppress(OSError):
        folders = [each for each in base.iterdir() if re.fullmatch("[0-9a-f]{32}", each.name)]
        folders.sort(key=lambda each: each.stat().st_mtime, reverse=True)
        for folder in folders[_KEPT:]:
            for file in folder.iterdir():
                file.unlink()
            folder.rmdir()


class _KernelCache(NullCache):  # type: ignore[misc]
    """One kernel's machine code, by types of arguments and CPU. It costs time, never an error."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._lock: int | None = None

    @cached_property
    def _files(self) -> Any:
        return _Files(self._function) if _folder() else NullCache()

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Waits while another process compiles this kernel, such as another rank. Without that, one
        of two that write to the kernel's index would also lose its entry."""
        found = self._load(sig, target_context)
        if found is None and self._take_lock():
            found = self._load(sig, target_context)
            if found is not None:
                self._release_lock()
        return found

    def _load(self, sig: Any, target_context: Any) -> Any:
        try:
            return self._files.load_overload(sig, target_context)
        except Exception as error:  # unpickling raises any
            self._report("compiled kernel is broken", error)
            with suppress(OSError):
                self._files.flush()
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            self._files.save_overload(sig, data)
        except OSError as error:
            self._report("compiled kernel is not kept", error)
        finally:
            self._release_lock()

    def _take_lock(self) -> bool:
        """Returns False if there is no folder, or whoever has the lock does not get on."""
        self._release_lock()  # of a compilation that failed
        if _folder() is None:
            return False
        with suppress(OSError):
            path = f"{_FOLDER}/{self._name}.lock"
            self._lock = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            for _ in range(round(_COMPILATION_S / _POLL_S)):
                with suppress(BlockingIOError):
                    fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return True
                time.sleep(_POLL_S)
        self._release_lock()
        return False

    def _release_lock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @property
    def _name(self) -> str:
        return f"{self._function.__module__}.{self._function.__qualname__}"

    def _report(self, event: str, error: Exception) -> None:
        log.warning(event, kernel=self._name, path=str(_FOLDER), reason=str(error))


class _Locator(_CacheLocator):  # type: ignore[misc]
    """Says where numba finds a function's files. Their names hold its module, name and line."""

    def __init__(self, function: Any, path: str) -> None:
        self._py_file = path  # for numba's warnings
        self._line = str(function.__code__.co_firstlineno)

    @classmethod
    def from_function(cls, function: Any, path: str) -> _Locator:
        return cls(function, path)

    def ensure_cache_path(self) -> None:
        assert _FOLDER
        with private_folder(_FOLDER, create=True):
            pass

    def get_cache_path(self) -> str:
        return str(_FOLDER)

    def get_source_stamp(self) -> str:
        return ""  # the folder's name has it

    def get_disambiguator(self) -> str:
        return self._line


class _Implementation(CompileResultCacheImpl):  # type: ignore[misc]
    _locator_classes = (_Locator,)


class _Files(FunctionCache):  # type: ignore[misc]
    _impl_class = _Implementation
