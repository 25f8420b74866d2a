"""Watches supervisord, and starts again what it has given up:
`python -m deploy.watchdog DIRECTORY [--tied]`.

supervisord starts what dies, and nothing else: it leaves alone what says that it cannot start, and
nobody notices that it hangs or has died itself. Like every service, the watchdog is a fork and its
keeper, which watch each other. They are the only processes that outlive their supervisord, unless
the stack is tied to another process.
"""

from __future__ import annotations

import gc

gc.disable()  # while importing, see `shared.process.run`

import argparse
import asyncio
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import ClassVar

import psutil
import structlog

from deploy.errors import SupervisorGoneError, SupervisorSilentError
from deploy.stack import Stack
from deploy.supervisor import (
    SupervisedProcess,
    stack_members,
    start_process,
    start_supervisor_again,
    supervised_processes,
)
from shared.backoff import Backoff
from shared.config import ServiceSettings, SettingsError, load_settings
from shared.process.fork import CANNOT_START
from shared.process.heartbeat import BEATS
from shared.process.parent import end_with_parent
from shared.process.run import Ready, run_service

log = structlog.get_logger(__name__)

_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.5, 10.0  # between tries to start the same process


class WatchdogSettings(ServiceSettings):
    """The stack's settings that the watchdog reads."""

    program: ClassVar[str] = "python -m deploy.watchdog"


class Pauses:
    """Tells when something is to be tried again: after longer and longer pauses, until it has not
    been asked for a while."""

    def __init__(self) -> None:
        self._tried: dict[str, tuple[float, float]] = {}  # when, and the pause after it

    def over(self, name: str) -> bool:
        """Whether to try now."""
        now = time.monotonic()
        tried, pause_s = self._tried.get(name, (now - _FIRST_PAUSE_S, 0.0))
        if now - tried > 2 * _LAST_PAUSE_S:
            pause_s = 0.0
        if now - tried < pause_s:
            return False
        self._tried[name] = now, min(max(2 * pause_s, _FIRST_PAUSE_S), _LAST_PAUSE_S)
        return True


class Watchdog:
    """Looks after the stack and its supervisord, which is given as a process."""

    def __init__(self, stack: Stack, supervisor: psutil.Process, interval_s: float) -> None:
        self._stack = stack
        self._supervisor = supervisor
        self._interval_s = interval_s
        self._silent = 0  # looks in a row
        self._pauses = Pauses()

    def look(self) -> bool:
        """Does what is needed now; returns whether supervisord is alive."""
        try:
            if self._supervisor.status() == psutil.STATUS_STOPPED:
                log.error("supervisord is stopped; continues it", pid=self._supervisor.pid)
                self._supervisor.resume()
            alive = self._supervisor.is_running()
            if not alive or self._supervisor.status() == psutil.STATUS_ZOMBIE:
                return False
        except psutil.NoSuchProcess:
            return False
        try:
            processes = supervised_processes(self._stack.directory, self._interval_s)
            self._silent = 0
            self._start_what_was_given_up(processes)
        except SupervisorSilentError:
            self._silent += 1  # rather than reading a clock, see `shared.process.heartbeat`
            if self._silent == BEATS:
                log.error("kills supervisord, which does not answer", pid=self._supervisor.pid)
                self._supervisor.kill()
        except SupervisorGoneError:  # it has not begun to listen, or its socket was removed
            pass
        return True

    def _start_what_was_given_up(self, processes: list[SupervisedProcess]) -> None:
        if not self._stack.was_up:
            return  # the launcher tells the user why it cannot start
        states = {each.name: each for each in processes}
        for process in self._stack.reloaded().processes():
            state = states.get(process.name)  # none while the stack is being scaled
            gave_up = state and (state.state, state.exit_status) == ("EXITED", CANNOT_START)
            if gave_up and self._pauses.over(process.name):
                log.error("could not start; starts it again", process=process.name)
                start_process(self._stack.directory, process)


def start_stack_again(stack: Stack, keeper: int) -> None:
    """Starts the stack after its supervisord has died; returns once there is another.

    Its processes have ended with it, or are about to: they are tied to it (`parent`).
    """
    pauses = Pauses()
    ours = {os.getpid(), keeper}
    while left := [each for each in stack_members(stack.directory) if each.pid not in ours]:
        for process in left:
            process.kill()
        psutil.wait_procs(left, timeout=1)
    log.error("supervisord died; starts the stack again")
    while True:
        if pauses.over("supervisord"):
            try:
                started = start_supervisor_again(stack.directory)
            except OSError as error:
                log.error("cannot start supervisord", reason=str(error))
                continue
            while started.poll() is None:
                try:
                    supervised_processes(stack.directory)
                    return
                except SupervisorGoneError:
                    time.sleep(0.05)
            log.error("supervisord cannot start", exit_status=started.returncode)
        time.sleep(0.05)


async def serve(
    stack: Stack, supervisor: psutil.Process, settings: WatchdogSettings, ready: Ready
) -> None:
    """Watches until supervisord is gone; then starts the stack again, if it had been up."""
    keeper = os.getppid()
    interval_s = settings.hang_timeout_s / BEATS
    watchdog = Watchdog(stack, supervisor, interval_s)
    ready()
    while True:
        if not await asyncio.to_thread(watchdog.look):
            break
        await asyncio.sleep(interval_s)
    if stack.was_up and not settings.exit_with_parent:
        await asyncio.to_thread(start_stack_again, stack, keeper)


def settings_at_last() -> WatchdogSettings:
    """Reads the settings, which the stack's start has checked: tries again for as long as they
    cannot be read."""
    backoff = Backoff(_FIRST_PAUSE_S, _LAST_PAUSE_S)
    while True:
        try:
            return load_settings(WatchdogSettings, [])
        except SettingsError as error:
            program, pause_s = WatchdogSettings.program, backoff.next_s()
            print(f"{program}: {error}; tries again in {pause_s:g} s", file=sys.stderr, flush=True)
            time.sleep(pause_s)


def main() -> int:
    gc.freeze()
    gc.enable()
    parser = argparse.ArgumentParser(prog=WatchdogSettings.program)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--tied", action="store_true", help="end with supervisord")
    args = parser.parse_args()
    if args.tied:
        end_with_parent()
    supervisor = psutil.Process(os.getppid())
    if "deploy.supervise" not in supervisor.cmdline():
        return 1  # it has died already: whoever started it will say so
    settings = settings_at_last().model_copy(update={"exit_with_parent": args.tied})
    return run_service("watchdog", settings, partial(serve, Stack.load(args.directory), supervisor))


if __name__ == "__main__":
    sys.exit(main())
