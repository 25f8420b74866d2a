"""Waits until a starting stack can answer a request, or finds out why it cannot start."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence

from deploy.errors import LaunchError, StartError
from deploy.health import SERVING, frontend_health
from deploy.logs import failure_reason, refusal
from deploy.native.processes import find_supervisor
from deploy.native.status import ProcessStatus, stack_status
from deploy.stack import Stack
from shared.process.fork import CANNOT_START

Report = Callable[[Sequence[ProcessStatus]], None]

_POLL_S = 0.2
_FIRST_POLL_S = 0.02  # until there is an answer
_MAX_RESTARTS = 3


def wait_until_serving(
    stack: Stack, report: Report, supervisor: subprocess.Popen[bytes] | None = None
) -> None:
    """Returns once all processes of a stack are SERVING.

    Args:
        report: is called with the state of all processes, several times a second.
        supervisor: that of the stack, if it has just been started.

    Raises:
        StartError: a process cannot start; the message says why.
        SupervisorGoneError: the stack has stopped.
    """

    def ask() -> Sequence[ProcessStatus]:
        if supervisor and supervisor.poll() is not None:
            log = stack.log("supervisor")
            raise StartError(f"the supervisor ended: {failure_reason(log)}", log)
        found = find_supervisor(stack.directory) if supervisor else None
        if supervisor and (found is None or found.state == "STARTING"):
            return []
        return stack_status(stack)

    def failed(status: ProcessStatus, what: str) -> StartError:
        log = stack.log(status.process.name)
        if refusal(log) is not None:  # also if it was started again before its end was seen
            what = "cannot start"
        return StartError(f"{status.process.name} {what}: {failure_reason(log)}", log)

    poll_until_serving(ask, report, failed)
    while not _all_answer(stack):
        poll_until_serving(ask, report, failed)


def poll_until_serving(
    ask: Callable[[], Sequence[ProcessStatus]],
    report: Report,
    failed: Callable[[ProcessStatus, str], LaunchError],
) -> Sequence[ProcessStatus]:
    """Returns the state of all processes once all are SERVING.

    There is no time limit, since a large model may take any time to load. The wait ends early if a
    process says that it cannot start, or crashes repeatedly.

    Args:
        ask: returns the state of all processes, or none yet; an exception ends the wait.
        report: is called with each answer.
        failed: returns the error to raise for a process and what it does, such as "cannot start".
    """
    pids: dict[str, set[int]] = {}
    while True:
        statuses = ask()
        report(statuses)
        for status in statuses:
            started = pids.setdefault(status.process.name, set())
            started |= {status.pid} if status.pid else set()
            if status.state == "FAILED":
                raise LaunchError(f"{status.process.name} {status.trouble}")
            if status.state == "EXITED" and status.exit_status == CANNOT_START:
                raise failed(status, "cannot start")
            if len(started) > _MAX_RESTARTS:
                raise failed(status, "crashes repeatedly")
        if statuses and all(status.health == SERVING for status in statuses):
            return statuses
        time.sleep(_POLL_S if statuses else _FIRST_POLL_S)


def _all_answer(stack: Stack) -> bool:
    """Whether all frontends on the shared port serve; tries often enough to reach each."""
    tries = 4 * stack.count("frontend") if stack.count("frontend") > 1 else 0
    return all(
        frontend_health(stack.address, stack.url, stack.public_tls) == SERVING for _ in range(tries)
    )
