"""A process of the campaign, and a pipe to it."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Self

from tests.waiting import WAIT_S

_PROCESSES = multiprocessing.get_context("spawn")  # gRPC is not fork-safe


class Child:
    """Runs `work(pipe, *arguments)`; killed at the end, if it has not ended."""

    def __init__(self, work: Callable[..., None], *arguments: object) -> None:
        self._pipe, theirs = _PROCESSES.Pipe()
        arguments = (work, theirs, *arguments)
        self._process = _PROCESSES.Process(target=_run, args=arguments, daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()

    def send(self, message: object) -> None:
        self._pipe.send(message)

    def receive(self) -> Any:
        """Returns the next message.

        Raises:
            EOFError: the process has ended.
            TimeoutError: no message came.
        """
        if not self._pipe.poll(WAIT_S):
            raise TimeoutError(f"waited {WAIT_S:.0f} s for a process of the campaign")
        return self._pipe.recv()


def _run(work: Callable[..., None], pipe: Connection, *arguments: object) -> None:
    os.setsid()  # sessions share the processors (autogroup): it is like a host
    work(pipe, *arguments)
