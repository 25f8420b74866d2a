"""Waits until a starting stack can answer a request, or finds out why it cannot start."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence

from deploy.errors import StartError, SupervisorGoneError
from deploy.health import SERVING, check_health
from deploy.logs import failure_reason
from deploy.native.status import ProcessStatus, stack_status
from deploy.stack import Stack
from shared.process.fork import CANNOT_START

Report = Callable[[Sequence[ProcessStatus]], None]

_POLL_S = 0.2
_SUPERVISOR_POLL_S = 0.02
_MAX_RESTARTS = 3


def wait_until_ready(
    stack: Stack,
    supervisor: subprocess.Popen[bytes],
    report: Report,
    check_stop: Callable[[], None] = lambda: None,
) -> None:
    """Returns once all processes of a stack that was just started are SERVING.

    Args:
        report: is called with the state of all processes, several times a second.
        check_stop: is called as often; an exception that it raises ends the wait.

    Raises:
        StartError: the stack cannot start; the message says why.
    """

    def ask() -> Sequence[ProcessStatus]:
        check_stop()
        if supervisor.poll() is not None:
            log = stack.log("supervisor")
            raise StartError(f"the supervisor ended: {failure_reason(log)}", log)
        try:
            return stack_status(stack)
        except SupervisorGoneError:  # it has not started yet
            return []

    wait_until_serving(stack, ask, report)


def wait_until_serving(
    stack: Stack, ask: Callable[[], Sequence[ProcessStatus]], report: Report
) -> None:
    """Returns once all processes are SERVING.

    There is no time limit, since a large model may take any time to load. The wait ends early if a
    process says that it cannot start, or crashes repeatedly.

    Args:
        ask: returns the state of all processes, or none yet; an exception ends the wait.
        report: is called with each answer.

    Raises:
        StartError: a process cannot start; the message says why.
    """
    starts: dict[str, set[int]] = {process.name: set() for process in stack.processes()}
    while True:
        statuses = ask()
        report(statuses)
        for status in statuses:
            _check(stack, status, starts[status.process.name])
        serving = bool(statuses) and all(status.health == SERVING for status in statuses)
        if serving and _all_answer(stack):
            return
        time.sleep(_POLL_S if statuses else _SUPERVISOR_POLL_S)


def _check(stack: Stack, status: ProcessStatus, pids: set[int]) -> None:
    name = status.process.name
    log = stack.log(name)
    if status.state == "EXITED" and status.exit_status == CANNOT_START:
        raise StartError(f"{name} cannot start: {failure_reason(log)}", log)
    if status.state == "FAILED":
        raise StartError(f"{name} {status.trouble}", stack.log("supervisor"))
    if status.pid is not None:
        pids.add(status.pid)
    if len(pids) > _MAX_RESTARTS:
        raise StartError(f"{name} crashes repeatedly: {failure_reason(log)}", log)


def _all_answer(stack: Stack) -> bool:
    """Whether all frontends on the shared port serve; tries often enough to reach each."""
    tries = 4 * stack.count("frontend") if stack.count("frontend") > 1 else 0
    tls = stack.tls("frontend")
    return all(check_health(stack.address, tls=tls) == SERVING for _ in range(tries))
