"""Compiles kernels with numba and keeps their machine code in the user's cache directory.

Numba's own cache is per checkout, and does not compile a function again if only a function that it
calls has changed. So the folder here is named after the content of all sources. Its files hold
pickles and machine code, so only this user may be able to write to it.
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

_KEPT = 8  # the maximum number of folders; each checkout or branch may have its own
_COMPILATION_S = 60.0  # maximum time to compile one kernel; a process that takes longer has stopped
_POLL_S = 0.05


def kernel(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """`numba.njit` with these options. A later process loads the kernels that this one compiles."""

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
    """The folder in $NUMBA_CACHE_DIR, if that is set, or in the user's cache directory. None if the
    user has no home directory."""
    try:
        base = Path(numba.config.CACHE_DIR or cache_folder("numba"))
    except OSError:
        return None
    return base / _digest(Path(__file__).parent)


_FOLDER = _choose_folder()


@cache
def _folder() -> Path | None:
    """Makes the folder if it is missing. Returns None if that fails or others may write to it."""
    try:
        if _FOLDER is None:
            raise FileNotFoundError("the user has no home")
        is_new = not _FOLDER.exists()
        with private_folder(_FOLDER, create=True) as number, suppress(OSError):
            os.utime(number)  # folders used last are dropped last
    except OSError as error:
        log.warning(
            "compiled kernels are not kept; each start compiles again",
            path=str(_FOLDER),
            reason=str(error),
        )
        return None
    if is_new:
        _drop_old(_FOLDER.parent)
    return _FOLDER


def _drop_old(base: Path) -> None:
    """Removes all folders but the newest. A process that uses a removed folder makes it again and
    compiles again."""
    with suppress(OSError):
        folders = [each for each in base.iterdir() if re.fullmatch("[0-9a-f]{32}", each.name)]
        folders.sort(key=lambda each: each.stat().st_mtime, reverse=True)
        for folder in folders[_KEPT:]:
            for file in folder.iterdir():
                file.unlink()
            folder.rmdir()


class _KernelCache(NullCache):  # type: ignore[misc]
    """One kernel's machine code, by argument types and CPU. A failure only costs time."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._lock: int | None = None

    @cached_property
    def _files(self) -> Any:
        return _Files(self._function) if _folder() else NullCache()

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Loads the kernel. Waits while another process, such as another rank, compiles it.

        Without the wait, one of two processes that write to the kernel's index would lose its
        entry.
        """
        found = self._load(sig, target_context)
        if found is None and self._take_lock():
            found = self._load(sig, target_context)
            if found is not None:
                self._release_lock()
        return found

    def _load(self, sig: Any, target_context: Any) -> Any:
        try:
            return self._files.load_overload(sig, target_context)
        except Exception as error:  # unpickling may raise any exception
            self._report("kept kernel is broken; compiling again", error)
            with suppress(OSError):
                self._files.flush()
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            self._files.save_overload(sig, data)
        except OSError as error:
            self._report("compiled kernel is not kept; the next start compiles again", error)
        finally:
            self._release_lock()

    def _take_lock(self) -> bool:
        """Takes the kernel's lock. Returns False if there is no folder, or if another process keeps
        the lock too long."""
        self._release_lock()  # a compilation that failed may still have it
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
    """Tells numba where a function's files are. Their names hold its module, name and line."""

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
        return ""  # the folder's name holds the digest of all sources

    def get_disambiguator(self) -> str:
        return self._line


class _Implementation(CompileResultCacheImpl):  # type: ignore[misc]
    _locator_classes = (_Locator,)


class _Files(FunctionCache):  # type: ignore[misc]
    _impl_class = _Implementation
