"""Restarts the processes of a running stack, and replaces its model, while it serves.

If there are several engines, frontends leave each one before it restarts, and return after.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import grpc
import psutil

from deploy.engines import (
    list_engines,
    num_frontends,
    wait_until_joined,
    wait_until_left,
)
from deploy.errors import LaunchError, StartError, SupervisorGoneError
from deploy.first_tokens import completion
from deploy.model import check_weights, resolve_model
from deploy.native.ending import is_alive, send
from deploy.native.guards import uninterrupted
from deploy.native.processes import (
    parent_processes,
    start_processes,
    stop_processes,
    stop_timeout_s,
)
from deploy.native.progress import show_progress
from deploy.native.scale import apply, changing
from deploy.native.startup import Report, wait_until_serving
from deploy.native.supervisor import command
from deploy.ports import reserve_ports
from deploy.stack import ENGINE_SERVICES, SERVICES, Process, Stack, first_token
from frontend.text.model_files import ModelFilesError, read_model_facts
from shared.process.parent_process import RESTART
from shared.process.parent_state import ParentState, read_parent_state
from shared.process.successor import START_S

_POLL_S = 0.02


def restart(
    directory: Path,
    service: str | None,
    engine: int | None = None,
    model: str | None = None,
    handover_timeout_s: float = 0.0,
) -> int:
    """Restarts the processes of `service`, of `engine` or all, each once the previous one serves
    again; returns 0 when all serve. If there are several engines, or a new model, the processes of
    an engine restart together.

    Args:
        model: replaces the model of the stack.
        handover_timeout_s: seconds for frontends to move their streams to other engines, and for
            streams that only one engine can finish: those of the last engine with a model.

    Raises:
        LaunchError: no stack runs in `directory`, or a process does not serve again. If the new
            model is the reason, its engine serves the old one again.
    """
    with changing(directory) as stack, show_progress(stack) as report:
        processes = _choose(stack, service, engine, bool(model))
        found = _find_model(stack, model) if model else None
        rest = processes
        if stack.engines > 1 or found:
            apply(stack)  # completes an interrupted command
            for number in range(stack.engines):
                if members := [each for each in processes if each.engine == number]:
                    wanted = _with_model(stack, number, found) if found else stack
                    _replace_engine(stack, wanted, number, members, handover_timeout_s, report)
                    stack = wanted
            rest = [each for each in processes if each.engine is None]
        wanted = replace(stack, model_path=str(found), engine_models=()) if found else stack
        wanted.save()
        try:
            for process in rest:
                _restart(wanted, [process], report)
        except SupervisorGoneError:  # another command has stopped the stack
            raise
        except LaunchError:
            stack.save()
            raise
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


def _find_model(stack: Stack, model: str) -> Path:
    """Returns the directory of a model that is to replace the stack's.

    Raises:
        LaunchError: the model does not exist, or frontends or workers cannot read it.
    """
    if not stack.model_path:
        raise LaunchError("MODEL: no process of the stack on this host reads a model")
    directory = Path(os.path.abspath(resolve_model(model)))
    if "worker" in stack.services:
        check_weights(model, directory)
    # Imported here: the import is slow, and other restarts do not need it.
    from frontend.text.tokenizer import Tokenizer

    try:
        read_model_facts(directory)
        Tokenizer(directory, threads=1).close()
    except ModelFilesError as error:
        raise LaunchError(f"MODEL: {error}") from error
    return directory


def _with_model(stack: Stack, engine: int, model: Path) -> Stack:
    models = [stack.model_of(each) for each in range(stack.engines)]
    models[engine] = str(model)
    return replace(stack, engine_models=tuple(models))


def _replace_engine(
    stack: Stack,
    wanted: Stack,
    engine: int,
    processes: Sequence[Process],
    handover_timeout_s: float,
    report: Report,
) -> None:
    """Restarts these processes of an engine, without streams if there are other engines. `wanted`
    is the stack with the engine's new model, if it gets one."""
    frontends = num_frontends(stack, engine)
    if stack.engines > 1:
        list_engines(stack, (each for each in range(stack.engines) if each != engine))
    try:
        wait_until_left(stack, engine, handover_timeout_s)
        wanted.save()
        _restart(wanted, processes, report)
    except StartError as error:
        if wanted == stack:
            raise
        stack.save()
        _restart(stack, processes, report)
        raise LaunchError(
            f"MODEL: {error}. Engine {engine} serves {stack.model_of(engine)} again"
        ) from error
    finally:
        list_engines(stack, range(stack.engines))
    # The engine to be replaced next may be the last one that they use.
    wait_until_joined(stack, engine, frontends)


def _restart(stack: Stack, processes: Sequence[Process], report: Report) -> None:
    """Restarts these processes at the same time; returns once the stack answers a request.

    Raises:
        StartError: a process cannot start.
    """
    with ExitStack() as held:
        if any(each.service == "frontend" for each in processes):
            ports = stack.port, stack.http_port
            held.enter_context(reserve_ports(stack.host, *ports, alone=False))
        with uninterrupted():
            if others := {each.name for each in processes} - _hand_over(stack, processes):
                stop_processes(stack, others)
                start_processes(stack, others)
        wait_until_serving(stack, report)
    # The engine may still be recovering. If it lost another process before it had computed
    # anything, it would conclude that the same step has failed again.
    while not _answers(stack):
        wait_until_serving(stack, report)


def _hand_over(stack: Stack, processes: Sequence[Process]) -> set[str]:
    """Lets successors replace parent processes, clients before the servers they call. They keep
    the memory that outlives forks. Returns once the old processes have ended.

    Returns:
        The names of the processes that were replaced. Those with another command line, or without a
        fork, are left alone.

    Raises:
        LaunchError: a successor cannot start, so the old process continues to serve.
    """
    parents = parent_processes(stack.directory)
    replaced: set[str] = set()
    for service in reversed(SERVICES):
        handing: dict[str, tuple[psutil.Process, ParentState]] = {}
        for process in (each for each in processes if each.service == service):
            with suppress(KeyError, psutil.Error):
                parent = parents[process.name]
                state = read_parent_state(parent.pid)
                same = parent.cmdline()[1:] == command(stack, process)[1:]
                if state and state.pid and same:
                    parent.send_signal(RESTART)
                    handing[process.name] = parent, state
        replaced |= handing.keys()
        _wait_until_replaced(stack, handing)
    return replaced


def _wait_until_replaced(
    stack: Stack, handing: Mapping[str, tuple[psutil.Process, ParentState]]
) -> None:
    """Waits until these parent processes, by name and with their states before, have ended."""
    deadline = time.monotonic() + START_S + stop_timeout_s(stack)
    said: set[str] = set()
    while alive := {name: each for name, each in handing.items() if is_alive(each[0])}:
        for name, (parent, before) in alive.items():
            state = read_parent_state(parent.pid) or before
            if state.num_refused != before.num_refused:
                raise LaunchError(
                    f"{name}: the new program cannot start ({state.remark}; see "
                    f"{stack.log(name)}); the old one continues to serve"
                )
            if state.remark not in ("", before.remark) and name not in said:
                print(f"{name}: {state.remark}")
                said.add(name)
            if time.monotonic() > deadline:
                send(parent.kill)  # its successor, or the supervisor, notices
        time.sleep(_POLL_S)


def _answers(stack: Stack) -> bool:
    """Whether an engine answers a request, or has a full queue. True if only a part of the stack
    runs on this host, because then no request can be sent.

    Raises:
        LaunchError: the request fails, and not because a service is unavailable.
    """
    if not set(ENGINE_SERVICES) <= set(stack.services):
        return True
    token = first_token(stack.auth_tokens_file)
    try:
        list(completion(stack.address, stack.public_tls, token, max_tokens=1))
    except LaunchError as error:
        code = error.__cause__.code() if isinstance(error.__cause__, grpc.RpcError) else None
        if code not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED):
            raise
        return code is grpc.StatusCode.RESOURCE_EXHAUSTED
    return True
