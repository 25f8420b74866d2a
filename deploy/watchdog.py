"""Kills local workers that do not answer, so that their successors take over:
`python -m deploy.watchdog DIRECTORY`.

A worker notices by itself that a step hangs (`worker_svc.hang_watch`). Only from outside can it be
seen that its process is stopped, or that an extension holds Python's lock.
"""

from __future__ import annotations

import gc

gc.disable()  # while importing, see `shared.process`

import sys
import threading
import time
from pathlib import Path
from typing import ClassVar

import psutil
import structlog
from pydantic import Field

from deploy.errors import SupervisorGoneError
from deploy.health import SERVING, SILENT, UNREACHABLE, check_health
from deploy.stack import Process, Stack
from deploy.supervisor import supervised_processes
from shared.config import ServiceSettings, settings_or_exit
from shared.logging import configure_logging
from shared.parent import end_with_parent
from worker_svc.settings import WorkerSettings

log = structlog.get_logger(__name__)

# Shares of `hang_timeout_s`; together less than 1.
_ANSWER_SHARE, _PAUSE_SHARE = 0.7, 0.15
# A wait this much longer than its timeout means that the watchdog itself got no processor.
_OWN_DELAY = 1.25


class WatchdogSettings(ServiceSettings):
    """The stack's settings that the watchdog reads."""

    program: ClassVar[str] = "python -m deploy.watchdog"

    hang_timeout_s: float = Field(WorkerSettings.model_fields["hang_timeout_s"].default, gt=0)


def watch(stack: Stack, worker: Process, hang_timeout_s: float) -> None:
    """Asks one worker for its health, for ever, and kills it if it does not answer though it has
    served before, or because it is stopped. A worker that is loading may be silent."""
    served: psutil.Process | None = None
    timeout_s = _ANSWER_SHARE * hang_timeout_s
    while True:
        asked = time.monotonic()
        health = check_health(worker.address, timeout_s)
        waited_s = time.monotonic() - asked
        if health == SERVING and served is None:
            served = _process(stack, worker)
        elif health == UNREACHABLE:
            served = None
        elif health == SILENT and waited_s < _OWN_DELAY * timeout_s:
            silent = served or _stopped(_process(stack, worker))
            if silent is not None:
                log.error("kills a worker that does not answer", worker=worker.name, pid=silent.pid)
                _kill(silent)
                served = None
        time.sleep(_PAUSE_SHARE * hang_timeout_s)


def _process(stack: Stack, worker: Process) -> psutil.Process | None:
    try:
        found = {each.name: each.pid for each in supervised_processes(stack.directory)}
        pid = found.get(worker.name)
        return None if pid is None else psutil.Process(pid)
    except (SupervisorGoneError, psutil.NoSuchProcess):
        return None


def _stopped(process: psutil.Process | None) -> psutil.Process | None:
    """Returns the process if it is stopped, else None."""
    try:
        return process if process and process.status() == psutil.STATUS_STOPPED else None
    except psutil.NoSuchProcess:
        return None


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:  # it has ended, or its pid belongs to another process now
        return


def main() -> None:
    gc.freeze()
    gc.enable()
    stack = Stack.load(Path(sys.argv[1]))
    settings = settings_or_exit(WatchdogSettings, [])
    configure_logging(settings, "watchdog")
    if settings.exit_with_parent:
        end_with_parent()
    threads = [
        threading.Thread(target=watch, args=(stack, process, settings.hang_timeout_s))
        for process in stack.processes()
        if process.service == "worker"
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
