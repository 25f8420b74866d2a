"""Processes that a benchmark starts and ends, and values that it reads beside them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from itertools import chain
from pathlib import Path
from typing import Generic, Self, TypeVar

from bench.workload import BenchError

_LOG_LINES = 12
_POLL_S = 0.1
_START_S = 120.0

Value = TypeVar("Value")


class BenchProcess:
    """A process `python -m MODULE --FLAG VALUE ...`, which ends when `stack` closes."""

    def __init__(self, stack: ExitStack, log: Path, module: str, **flags: object) -> None:
        pairs = [("--" + name.replace("_", "-"), str(value)) for name, value in flags.items()]
        self._log = log
        self._module = module
        with log.open("wb") as file:
            command = [sys.executable, "-m", module, *chain(*pairs)]
            self._popen = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        self.pid = self._popen.pid
        stack.callback(self._stop)

    async def wait_until(self, is_ready: Callable[[], bool]) -> None:
        """Calls `is_ready`, in a thread, until it returns true.

        Raises:
            BenchError: the process has ended (the message has the end of its log), or is not ready
                in time.
        """
        deadline = time.monotonic() + _START_S
        while not await asyncio.to_thread(is_ready):
            if self._popen.poll() is not None:
                lines = self._log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
                raise BenchError("\n".join([f"{self._module} ended:", *lines]))
            if time.monotonic() > deadline:
                raise BenchError(f"{self._module} was not ready after {_START_S:.0f} s")
            await asyncio.sleep(_POLL_S)

    def _stop(self) -> None:
        self._popen.kill()  # the process holds nothing that must be saved
        self._popen.wait()


class Supervised:
    """A process that is started again at once whenever it ends, until `close`. What its group still
    runs is killed before, as service managers do.

    Args:
        variables: of the environment, unless it has them.
        log: gets the output of all starts.
    """

    def __init__(self, command: list[str], variables: Mapping[str, str], log: Path) -> None:
        self._command, self._variables, self._log = command, variables, log
        self._closing = False
        self.starts = 0
        self._popen = self._start()
        self._thread = threading.Thread(target=self._restart, daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        return self._popen.pid

    def close(self) -> None:
        self._closing = True
        while self._thread.is_alive():
            self._popen.kill()
            self._thread.join(_POLL_S)

    def _start(self) -> subprocess.Popen[bytes]:
        self.starts += 1
        with self._log.open("ab") as log:
            return subprocess.Popen(
                self._command,
                env={**self._variables, **os.environ},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _restart(self) -> None:
        while True:
            self._popen.wait()
            with suppress(ProcessLookupError):  # nothing is left
                os.killpg(self.pid, signal.SIGKILL)
            if self._closing:
                return
            self._popen = self._start()


class Samples(Generic[Value]):
    """Reads a value again and again in a thread, while it is entered.

    Args:
        period_s: seconds from one reading to the next.
    """

    def __init__(self, read: Callable[[], Value], period_s: float) -> None:
        self.found: list[tuple[float, Value]] = []  # with the time before each reading
        self._read, self._period_s = read, period_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _sample(self) -> None:
        pause_s = 0.0
        while not self._over.wait(pause_s):
            start = time.perf_counter()
            self.found.append((start, self._read()))
            pause_s = max(start + self._period_s - time.perf_counter(), 0.0)
