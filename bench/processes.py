"""Processes that a benchmark starts and ends."""

from __future__ import annotations

import subprocess
import sys
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

from bench.errors import BenchError

_LOG_LINES = 12


class BenchProcess:
    """`python -m MODULE --FLAG VALUE ...`, which ends with `stack`; a list is several values."""

    def __init__(
        self, stack: ExitStack | AsyncExitStack, log: Path, module: str, **flags: object
    ) -> None:
        args = [part for name, value in flags.items() for part in (_flag(name), *_values(value))]
        self._log = log
        self._module = module
        with log.open("wb") as file:
            command = [sys.executable, "-m", module, *args]
            self._popen = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        self.pid = self._popen.pid
        stack.callback(self._stop)

    def check(self) -> None:
        """
        Raises:
            BenchError: it has ended; the message has the end of its log.
        """
        if self._popen.poll() is not None:
            lines = self._log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
            raise BenchError("\n".join([f"{self._module} ended:", *lines]))

    def _stop(self) -> None:
        self._popen.kill()  # neither has anything to lose
        self._popen.wait()


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _values(value: object) -> list[str]:
    return [str(each) for each in value] if isinstance(value, list) else [str(value)]
