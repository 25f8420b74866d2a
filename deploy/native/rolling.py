"""Replaces the engines of a running stack one after another, while the others serve."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from deploy.engines import (
    link_model,
    list_engines,
    num_frontends,
    wait_until_joined,
    wait_until_left,
)
from deploy.errors import LaunchError, StartError
from deploy.model import resolve_model
from deploy.native.guards import uninterrupted
from deploy.native.processes import start_processes, stop_processes
from deploy.native.startup import Report, wait_until_serving
from deploy.native.status import stack_status
from deploy.stack import Process, Stack
from frontend.text.model_files import ModelFilesError, read_model_facts


def replace_engine(
    stack: Stack,
    engine: int,
    processes: Sequence[Process],
    handover_timeout_s: float,
    report: Report,
    model: Path | None = None,
) -> None:
    """Restarts these processes of an engine. Frontends leave it before, and return after.

    Args:
        handover_timeout_s: seconds for frontends to move their streams to other engines, and for
            streams that only this engine can finish: those of the last engine with a model.
        model: the engine's new model; None: it keeps its model.

    Raises:
        LaunchError: a process does not serve again. If the new model is the reason, the engine
            serves the old one again.
    """
    frontends = num_frontends(stack, engine)
    if stack.engines > 1:
        list_engines(stack, (each for each in range(stack.engines) if each != engine))
    try:
        wait_until_left(stack, engine, handover_timeout_s)
        if model:
            _replace_model(stack, engine, processes, report, model)
        else:
            _replace(stack, processes, report)
    except StartError as error:
        raise LaunchError(f"{error} (log: {error.log})") from error
    finally:
        list_engines(stack, range(stack.engines))
    # The engine to be replaced next may be the last one that they use.
    wait_until_joined(stack, engine, frontends)


def _replace(stack: Stack, processes: Sequence[Process], report: Report) -> None:
    names = [each.name for each in processes]
    with uninterrupted():
        stop_processes(stack, names)
        start_processes(stack, names)
    wait_until_serving(stack, lambda: stack_status(stack), report)


def _replace_model(
    stack: Stack, engine: int, processes: Sequence[Process], report: Report, model: Path
) -> None:
    link = stack.model_link(engine)
    before = link.readlink()
    link_model(link, model)
    try:
        _replace(stack, processes, report)
    except StartError as error:
        link_model(link, before)
        _replace(stack, processes, report)
        raise LaunchError(
            f"MODEL: {error} (log: {error.log}). Engine {engine} serves {before} again"
        ) from error


def find_model(stack: Stack, model: str) -> Path:
    """Returns the directory of a model that is to replace the stack's.

    Raises:
        LaunchError: the model does not exist, or frontends cannot read it.
    """
    if not stack.model_path:
        raise LaunchError("MODEL: no process of the stack on this host reads a model")
    directory = Path(os.path.abspath(resolve_model(model)))
    # Imported here: the import is slow, and other restarts do not need it.
    from frontend.text.tokenizer import Tokenizer

    try:
        read_model_facts(directory)
        Tokenizer(directory, threads=1).close()
    except ModelFilesError as error:
        raise LaunchError(f"MODEL: {error}") from error
    return directory
