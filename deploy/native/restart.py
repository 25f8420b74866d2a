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
    drain_timeout_s: float = 0.0,
) -> int:
    """Restarts each process, of `service`, of `engine` or of all, once the one before serves again;
    returns 0 when all do. Where there are several engines, these go one after another instead, each
    without streams.

    Args:
        model: replaces the model of the stack.
        drain_timeout_s: for streams to leave an engine, or to end.

    Raises:
        LaunchError: no stack runs in `directory`, or a process does not come back.
    """
    Stack.load(directory)  # says so if there is none
    with locked(directory), signals_interrupt():
        stack = Stack.load(directory)
        wake_supervisor(directory)  # likewise if it does not run
        processes = _choose(stack, service, engine, bool(model))
        found = find_model(stack, model) if model else None
        in_turn = [each for each in processes if stack.engines == 1 and not found]
        with show_progress(stack) as report:
            if not in_turn:
                apply(stack)  # what an interrupted command has left out
            for number in range(0 if in_turn else stack.engines):
                if members := [each for each in processes if each.engine == number]:
                    replace_engine(stack, number, members, drain_timeout_s, report, found)
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
        raise LaunchError(f"ENGINE: {engine} is none of the {stack.engines}, which begin with 0")
    if other_model and (service, engine) != (None, None):
        raise LaunchError("MODEL: is all engines' and frontends'; leave out SERVICE and ENGINE")
    processes = [each for each in stack.processes() if service in (None, each.service)]
    if not processes:
        raise LaunchError(f"SERVICE: this host's part of the stack has no {service}")
    chosen = [each for each in processes if engine in (None, each.engine)]
    if not chosen:
        raise LaunchError(f"SERVICE: an engine has no {service}")
    return chosen


def _replace_model(stack: Stack, rest: Iterable[Process], report: Report, model: Path) -> None:
    """Gives the model to what is of no engine, and to engines to come."""
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
