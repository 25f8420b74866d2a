"""Ties the life of a process to that of its parent process."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def end_with_parent(parent: int | None = None, number: int = signal.SIGKILL) -> None:
    """Asks the kernel (Linux) to send this process a signal as soon as its parent dies, whatever
    the cause. To the kernel, the parent is the thread that started this process.

    Args:
        parent: the parent's process id. None: it is dead if process 1 has adopted this one.

    Raises:
        SystemExit: the parent is already dead.
    """
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() == 1 if parent is None else os.getppid() != parent:
        raise SystemExit(1)


def adopt_orphans() -> None:
    """Makes this process, instead of process 1, the parent process of its descendants whose parent
    process has ended."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")
