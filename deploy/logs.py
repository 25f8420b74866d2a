"""Reads the services' logs: the reason for a failure, the latest event."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NoReturn

from deploy.errors import LaunchError
from deploy.stack import check_directory

_TAIL_BYTES = 32 << 10


def last_lines(log: Path, count: int) -> list[str]:
    """Returns the last `count` non-empty lines of `log`; none if there is no file."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
    except FileNotFoundError:
        return []
    return [line for line in text.splitlines() if line.strip()][-count:]


def last_event(log: Path) -> str:
    """Returns the latest event of a process, as text; empty if there is none."""
    line = "".join(last_lines(log, 1))
    entry = _parse(line)
    if "event" not in entry:
        return line.strip()
    hidden = ("event", "level", "timestamp", "service", "rank", "exception")
    fields = [f"{key}={value}" for key, value in entry.items() if key not in hidden]
    return " ".join([str(entry["event"]), *fields])


def refusal(log: Path) -> str | None:
    """Returns the reason for which a process could not start, if it has logged one."""
    entries = [_parse(line) for line in last_lines(log, 50)]
    refusals = [each for each in entries if each.get("event") == "cannot start"]
    return str(refusals[-1].get("reason", "")) if refusals else None


def failure_reason(log: Path) -> str:
    """Returns the reason that a process logged for its end, else its last line."""
    reason = refusal(log)
    return (last_event(log) or "it logged nothing") if reason is None else reason


def follow(directory: Path, service: str | None) -> NoReturn:
    """Follows the logs in `directory`, of all services or one: tail(1) replaces this process.

    Raises:
        LaunchError: there are no logs, or other users may have put them there.
    """
    check_directory(directory)
    logs = sorted(directory.glob(f"{service or '*'}-*.log"))
    if not logs:
        raise LaunchError(f"no logs of {service or 'any service'} in {directory}")
    os.execvp("tail", ["tail", "-n", "50", "-F", *map(str, logs)])


def _parse(line: str) -> dict[str, object]:
    try:
        entry = json.loads(line)
    except ValueError:
        return {}
    return entry if isinstance(entry, dict) else {}
