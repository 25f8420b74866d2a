"""Finds the reason for a failure in the last lines that a process logged."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.logs import failure_reason, last_event

CANNOT = '{"event": "cannot start", "level": "error", "reason": "no config.json"}'
LISTENING = '{"event": "listening", "level": "info", "address": "unix:x", "service": "worker"}'


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (f"{LISTENING}\n{CANNOT}\nsome warning at exit\n", "no config.json"),
        ("Traceback (most recent call last):\n  ...\nValueError: bad\n\n", "ValueError: bad"),
        ("python -m worker_svc: tp: 0 is too small\n", "python -m worker_svc: tp: 0 is too small"),
        ("", "it logged nothing"),
        ("[1, 2]\n", "[1, 2]"),
    ],
)
def test_failure_reason(tmp_path: Path, text: str, reason: str) -> None:
    log = tmp_path / "worker-0.log"
    log.write_text(text)
    assert failure_reason(log) == reason


def test_last_event(tmp_path: Path) -> None:
    log = tmp_path / "worker-0.log"
    assert last_event(log) == ""
    log.write_text(f"older\n{LISTENING}\n")
    assert last_event(log) == "listening address=unix:x"
