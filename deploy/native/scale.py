"""Changes the number of a running stack's engines, while it serves."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from deploy.engines import (
    DRAIN_S,
    check_engines,
    extra_master_ports,
    list_engines,
    num_frontends,
    wait_until_joined,
    wait_until_left,
)
from deploy.errors import SupervisorGoneError
from deploy.native.guards import ignore_signals, locked, signals_interrupt
from deploy.native.processes import (
    parent_processes,
    start_processes,
    stop_processes,
    stopped_processes,
    wake_supervisor,
)
from deploy.native.progress import show_progress
from deploy.native.startup import wait_until_serving
from deploy.stack import Stack


def scale(directory: Path, engines: int) -> int:
    """Starts or stops the last engines; returns 0 once `engines` serve. Frontends use a new engine
    only when it serves, and leave an engine before it stops. After an interruption, the same
    command continues, and one with another number undoes it.

    Raises:
        LaunchError: no stack runs in `directory`, it cannot have this number of engines, or a new
            engine cannot start. In this case, the number of engines is as before.
    """
    with changing(directory) as stack:
        wanted = replace(
            stack,
            engines=engines,
            engine_models=stack.engine_models[:engines],
            master_ports=extra_master_ports(stack, engines),
        )
        check_engines(wanted)
        if engines >= stack.engines:
            _start_engines(stack, wanted)
        else:
            _stop_engines(stack, wanted)
    print(f"{engines} engines serve" if engines > 1 else "1 engine serves")
    return 0


def _start_engines(stack: Stack, wanted: Stack) -> None:
    wanted.save()  # if it cannot be, nothing has changed
    try:
        apply(wanted)
        with show_progress(wanted) as report:
            wait_until_serving(wanted, report)
    except SupervisorGoneError:  # the stack is stopping, or its next supervisor starts them
        raise
    except BaseException:
        if wanted.engines > stack.engines:
            ignore_signals()
            print("stopping the new engines", file=sys.stderr)
            apply(stack)
        raise
    frontends = num_frontends(stack, 0)
    list_engines(wanted, range(wanted.engines))
    for engine in range(stack.engines, wanted.engines):
        wait_until_joined(wanted, engine, frontends)


def _stop_engines(stack: Stack, wanted: Stack) -> None:
    list_engines(wanted, range(wanted.engines))
    for engine in range(wanted.engines, stack.engines):
        wait_until_left(stack, engine, DRAIN_S)
    apply(wanted)


@contextmanager
def changing(directory: Path) -> Iterator[Stack]:
    """Yields a running stack that a command is going to change. One command at a time may, and
    stop signals interrupt it.

    Raises:
        LaunchError: no stack or no supervisor runs in `directory`, or another command is changing
            the stack.
    """
    Stack.load(directory)  # first, because the lock makes the directory
    with locked(directory), signals_interrupt():
        wake_supervisor(directory)
        yield Stack.load(directory)


def apply(stack: Stack) -> None:
    """Starts and stops processes until those of `stack` run. Present ones stay as they are."""
    stack.save()
    names = {process.name for process in stack.processes()}
    stop_processes(stack, parent_processes(stack.directory).keys() - names)
    _remove_leftovers(stack, names)
    start_processes(stack, stopped_processes(stack.directory))


def _remove_leftovers(stack: Stack, names: Collection[str]) -> None:
    """Removes the files of stopped engines; otherwise Prometheus would report them as down."""
    for pattern in "metrics/worker-*.json", "metrics/scheduler-*.json":
        for file in stack.directory.glob(pattern):
            if file.stem not in names:
                file.unlink(missing_ok=True)
