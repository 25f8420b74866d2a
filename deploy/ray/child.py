"""A command that is started again whenever it ends, with its output in a log of bounded size."""

from __future__ import annotations

import logging
import os
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from logging.handlers import RotatingFileHandler
from pathlib import Path

from shared.backoff import Backoff

_LOG_BYTES, _OLD_LOGS = 10 << 20, 2
# Between tries: doubled after each, until one has run for longer than the last.
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.1, 10.0


class Child:
    """A child of the thread that calls `keep`, whose end it does not outlive if it was told
    NANO_EXIT_WITH_PARENT."""

    def __init__(self, command: Sequence[str], log: Path, grace_s: float) -> None:
        self.log = log
        self.exit_status: int | None = None  # of the last one, if none runs
        self._command = command
        self._grace_s = grace_s
        self._environment: Mapping[str, str] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._started = self._due = 0.0
        self._backoff = Backoff(_FIRST_PAUSE_S, _LAST_PAUSE_S)
        reading, self._output = os.pipe()
        threading.Thread(target=_copy, args=(reading, log), daemon=True).start()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def keep(self, environment: Mapping[str, str]) -> None:
        """Starts the command if it does not run, again if it ran in another environment."""
        self._look()
        if self._process and environment != self._environment:
            self.kill()  # it calls where nobody is any more: nothing of its work is lost
            self._due = 0.0
        if not self._process and time.monotonic() >= self._due:
            self._environment = environment
            self._started = time.monotonic()
            self._process = subprocess.Popen(
                self._command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                start_new_session=True,
            )

    def kill(self) -> None:
        if self._process:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        """Lets it end by itself, for as long as it may take."""
        if self._process:
            self._process.terminate()
            try:
                self._process.wait(self._grace_s)
            except subprocess.TimeoutExpired:
                self.kill()
            self._process = None

    def _look(self) -> None:
        if not self._process or self._process.poll() is None:
            return
        now = time.monotonic()
        if now - self._started > _LAST_PAUSE_S:
            self._backoff.reset()
        self._due = now + self._backoff.next_s()
        self.exit_status = self._process.returncode
        self._process = None


def _copy(reading: int, log: Path) -> None:
    """Copies lines into `log`; what cannot be written, as on a full disk, is dropped."""
    handler = RotatingFileHandler(log, maxBytes=_LOG_BYTES, backupCount=_OLD_LOGS)
    with open(reading, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            handler.emit(logging.makeLogRecord({"msg": line.rstrip("\n")}))
