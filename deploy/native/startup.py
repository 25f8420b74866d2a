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
_SUPERVISOR_POLL_S = 0.02  # until it shows its first state
_MAX_RESTARTS = 3


def wait_until_serving(
    stack: Stack, report: Report, supervisor: subprocess.Popen[bytes] | None = None
) -> None:
    """Returns once all processes are SERVING.

    There is no time limit, since a large model may take any time to load. The wait ends early if a
    process says that it cannot start, or crashes repeatedly.

    Args:
        report: is called with the state of all processes, several times a second.
        supervisor: that of the stack, if it has just been started.

    Raises:
        StartError: a process cannot start; the message says why.
        SupervisorGoneError: the stack has stopped.
    """
    starts: dict[str, set[int]] = {process.name: set() for process in stack.processes()}
    while True:
        if supervisor and supervisor.poll() is not None:
            log = stack.log("supervisor")
            raise StartError(f"the supervisor ended: {failure_reason(log)}", log)
        try:
            statuses = stack_status(stack)
        except SupervisorGoneError:
            if not supervisor:
                raise
            time.sleep(_SUPERVISOR_POLL_S)
            continue
        report(statuses)
        for status in statuses:
            _check(stack, status, starts[status.process.name])
        if all(status.health == SERVING for status in statuses) and _all_answer(stack):
            return
        time.sleep(_POLL_S)


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
