"""Restarts the processes of a running stack one after another, while it serves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import grpc

from deploy.engines import link_model
from deploy.errors import LaunchError, StartError
from deploy.first_tokens import stream_completion
from deploy.native.guards import locked, signals_interrupt, uninterrupted
from deploy.native.processes import start_processes, stop_processes, wake_supervisor
from deploy.native.progress import show_progress
from deploy.native.rolling import find_model, replace_engine
from deploy.native.scale import apply
from deploy.native.startup import Report, wait_until_serving
from deploy.native.status import stack_status
from deploy.stack import ENGINE_SERVICES, Process, Stack, first_token


def restart(
    directory: Path,
    service: str | None,
    engine: int | None = None,
    model: str | None = None,
    handover_timeout_s: float = 0.0,
) -> int:
    """Restarts the processes of `service`, of `engine` or all, each once the previous one serves
    again; returns 0 when all serve. If there are several engines, it instead restarts engine after
    engine, each without streams.

    Args:
        model: replaces the model of the stack.
        handover_timeout_s: seconds for streams to move to another engine or end.

    Raises:
        LaunchError: no stack runs in `directory`, or a process does not come back.
    """
    Stack.load(directory)  # raises if there is no stack
    with locked(directory), signals_interrupt():
        stack = Stack.load(directory)
        wake_supervisor(directory)  # raises if there is no supervisor
        processes = _choose(stack, service, engine, bool(model))
        found = find_model(stack, model) if model else None
        in_turn = [each for each in processes if stack.engines == 1 and not found]
        with show_progress(stack) as report:
            if not in_turn:
                apply(stack)  # completes an interrupted command
            for number in range(0 if in_turn else stack.engines):
                if members := [each for each in processes if each.engine == number]:
                    replace_engine(stack, number, members, handover_timeout_s, report, found)
            rest = in_turn or [each for each in processes if each.engine is None]
            if found:
                _replace_model(stack, rest, report, found)
            else:
                _restart_each(stack, rest, report)
    print(f"restarted {len(processes)} processes" + (f" with {found}" if found else ""))
    return 0


def _choose(
    stack: Stack, service: str | None, engine: int | None, other_model: bool
) -> list[Process]:
    if engine is not None and engine >= stack.engines:
        raise LaunchError(f"ENGINE: {engine} is not in [0, {stack.engines - 1}]")
    if other_model and (service, engine) != (None, None):
        raise LaunchError("MODEL: applies to the whole stack; leave out SERVICE and ENGINE")
    processes = [each for each in stack.processes() if service in (None, each.service)]
    if not processes:
        raise LaunchError(f"SERVICE: no {service} of the stack runs on this host")
    chosen = [each for each in processes if engine in (None, each.engine)]
    if not chosen:
        raise LaunchError(f"SERVICE: an engine has no {service}")
    return chosen


def _replace_model(stack: Stack, rest: Iterable[Process], report: Report, model: Path) -> None:
    """Gives the model to processes that belong to no engine, and to future engines."""
    link_model(stack.model_link(), model)
    try:
        _restart_each(stack, rest, report)
    except LaunchError:
        link_model(stack.model_link(), Path(stack.model_path))
        raise
    replace(stack, model_path=str(model)).save()


def _restart_each(stack: Stack, processes: Iterable[Process], report: Report) -> None:
    for process in processes:
        _restart(stack, process, report)


def _restart(stack: Stack, process: Process, report: Report) -> None:
    with uninterrupted():
        stop_processes(stack, [process.name])
        start_processes(stack, [process.name])
    try:
        wait_until_serving(stack, lambda: stack_status(stack), report)
        # The engine may still be recovering. If it lost another process before it had computed
        # anything, it would conclude that the same step has failed again.
        while not _answers(stack):
            wait_until_serving(stack, lambda: stack_status(stack), report)
    except StartError as error:
        raise LaunchError(f"{error} (log: {error.log})") from error


def _answers(stack: Stack) -> bool:
    """Whether the engine answers a request, or has a full queue. True if only a part of the stack
    runs on this host, because then no request can be sent.

    Raises:
        LaunchError: the request fails, and not because a service is unavailable.
    """
    if not set(ENGINE_SERVICES) <= set(stack.services):
        return True
    try:
        stream_completion(
            stack.address,
            lambda _: None,
            stack.public_tls,
            first_token(stack.auth_tokens_file),
            max_tokens=1,
        )
    except LaunchError as error:
        code = error.__cause__.code() if isinstance(error.__cause__, grpc.RpcError) else None
        if code not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED):
            raise
        return code is grpc.StatusCode.RESOURCE_EXHAUSTED
    return True
