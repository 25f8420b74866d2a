"""The launcher's errors.

LaunchError        a stack cannot be started or reached
├── StartError             one of its processes cannot start; says in which log
└── SupervisorGoneError    no supervisord answers for it
"""

from __future__ import annotations

from pathlib import Path


class LaunchError(Exception):
    """The message is the reason, for the person who asked."""


class StartError(LaunchError):
    """A process of the stack cannot start; `log` is where it said more."""

    def __init__(self, message: str, log: Path) -> None:
        super().__init__(message)
        self.log = log


class SupervisorGoneError(LaunchError):
    """No supervisord answers for this stack: not yet, or not any more."""
