"""A process of the campaign, which is spoken to in lines."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from typing import Any, Self

from tests.stack import ROOT
from tests.waiting import WAIT_S


class Child:
    """Runs `python -m module`; killed at the end, if it has not ended."""

    def __init__(self, module: str, *arguments: str) -> None:
        self.module = module
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # sessions share the processors (autogroup): it is like a host
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._input.close()
        self._output.close()

    def say(self, line: str) -> None:
        self._input.write(line + "\n")
        self._input.flush()

    def expect(self, line: str) -> None:
        found = self._read()
        if found != line:
            raise AssertionError(f"{self.module} said {found!r} instead of {line}")

    def answer(self) -> dict[str, Any]:
        """Returns what the next line says in JSON."""
        line = self._read()
        if not line:
            raise AssertionError(f"{self.module} ended without an answer")
        found: dict[str, Any] = json.loads(line)
        return found

    def _read(self) -> str:
        alarm = threading.Timer(WAIT_S, self._process.kill)
        alarm.start()
        try:
            return self._output.readline().strip()
        finally:
            alarm.cancel()
