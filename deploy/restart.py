"""Restarts the processes of a running stack one after another, while it serves."""

from __future__ import annotations

from pathlib import Path

import grpc

from deploy.errors import LaunchError, StartError
from deploy.first_tokens import stream_completion
from deploy.guards import uninterrupted
from deploy.progress import show_progress
from deploy.stack import ENGINE_SERVICES, Process, Stack, first_token
from deploy.startup import Report, wait_until_serving
from deploy.status import stack_status
from deploy.supervisor import start_process, stop_process


def restart(directory: Path, service: str | None) -> int:
    """Restarts each process, of `service` or of all, once the one before serves again; returns 0
    when all do.

    Raises:
        LaunchError: no stack runs in `directory`, or a process does not come back.
    """
    stack = Stack.load(directory)
    processes = [each for each in stack.processes() if service in (None, each.service)]
    if not processes:
        raise LaunchError(f"SERVICE: this host's part of the stack has no {service}")
    with show_progress(stack) as report:
        for process in processes:
            _restart(stack, process, report)
    print(f"restarted {len(processes)} processes")
    return 0


def _restart(stack: Stack, process: Process, report: Report) -> None:
    with uninterrupted():
        stop_process(stack.directory, process)
        start_process(stack.directory, process)
    try:
        wait_until_serving(stack, lambda: stack_status(stack), report)
        # The engine may still be recovering. If it lost something again before it had computed
        # anything, that would look to it like the same step failing again.
        while not _answers(stack):
            wait_until_serving(stack, lambda: stack_status(stack), report)
    except StartError as error:
        raise LaunchError(f"{error} (log: {error.log})") from error


def _answers(stack: Stack) -> bool:
    """Whether the engine answers a request, or has a full queue of them. True if only a part of the
    stack runs on this host: then there is nobody to ask.

    Raises:
        LaunchError: the request fails for another reason than that something is unavailable.
    """
    if not set(ENGINE_SERVICES) <= set(stack.services):
        return True
    try:
        stream_completion(
            stack.address, lambda _: None, stack.public_tls, first_token(stack), max_tokens=1
        )
    except LaunchError as error:
        code = error.__cause__.code() if isinstance(error.__cause__, grpc.RpcError) else None
        if code not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED):
            raise
        return code is grpc.StatusCode.RESOURCE_EXHAUSTED
    return True
