"""The launcher's errors.

LaunchError        a stack cannot be started or reached
├── StartError             a process of the stack cannot start; has its log
└── SupervisorGoneError    the stack has no supervisor
"""

from __future__ import annotations

from pathlib import Path


class LaunchError(Exception):
    """A stack cannot be started or reached; the message tells the user why."""


class StartError(LaunchError):
    """A process of the stack cannot start; its `log` has details."""

    def __init__(self, message: str, log: Path) -> None:
        super().__init__(message)
        self.log = log


class SupervisorGoneError(LaunchError):
    """The stack has no supervisor: not yet, or no longer."""
