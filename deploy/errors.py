"""The launcher's errors.

LaunchError        a stack cannot be started or reached
├── StartError             a process of the stack cannot start; names its log
└── SupervisorGoneError    the stack has no supervisor
"""

from __future__ import annotations

from pathlib import Path


class LaunchError(Exception):
    """A stack cannot be started or reached; the message tells the user why."""


class StartError(LaunchError):
    """A process of the stack cannot start. The message names its log, `reason` does not."""

    def __init__(self, reason: str, log: Path) -> None:
        super().__init__(f"{reason} (log: {log})")
        self.reason = reason


class SupervisorGoneError(LaunchError):
    """The stack has no supervisor: not yet, or no longer."""
