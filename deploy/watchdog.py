"""Kills local workers that do not answer, for their successors to take over:
`python -m deploy.watchdog DIRECTORY`.

A worker sees for itself that a step hangs (`worker_svc.hang_watch`). That its process is stopped,
or that an extension keeps Python's lock, can be seen only from outside.
"""

from __future__ import annotations

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

# Shares of `hang_timeout_s`: together less than it.
_ANSWER_SHARE, _PAUSE_SHARE = 0.7, 0.15
# An answer that was waited for this much longer says that the watchdog itself got no processor.
_OWN_DELAY = 1.25


class WatchdogSettings(ServiceSettings):
    """What of the stack's settings it reads."""

    program: ClassVar[str] = "python -m deploy.watchdog"

    hang_timeout_s: float = Field(WorkerSettings.model_fields["hang_timeout_s"].default, gt=0)


def watch(stack: Stack, worker: Process, hang_timeout_s: float) -> None:
    """Asks one worker for its health, for ever, and kills it when it has served before and does not
    answer any more, or is stopped. One that is loading may be silent."""
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
    """The process, if it is stopped."""
    try:
        return process if process and process.status() == psutil.STATUS_STOPPED else None
    except psutil.NoSuchProcess:
        return None


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:  # it has ended, or its number belongs to another now
        return


def main() -> None:
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
