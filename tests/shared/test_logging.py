from __future__ import annotations

import json
import sys
from collections.abc import Iterator

import pytest
import structlog

from frontend.settings import FrontendSettings
from shared.config import load_settings
from shared.telemetry.logging import configure_logging


@pytest.fixture(autouse=True)
def _defaults_afterwards(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "stderr", sys.stderr)  # the tests replace it
    yield
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


def fail() -> None:
    prompt = "a " + "secret"
    assert prompt
    raise ValueError("why")


@pytest.mark.parametrize("terminal", [False, True])
def test_tracebacks_hold_no_local_variables(
    terminal: bool, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    configure_logging(load_settings(FrontendSettings, []), "test")
    try:
        fail()
    except ValueError as error:
        structlog.get_logger().error("failed", exc_info=error)
    line = capfd.readouterr().err
    assert "ValueError" in line
    assert "why" in line
    assert "a secret" not in line
    assert line.startswith("{") != terminal


def test_json_lines_hold_what_is_bound(capfd: pytest.CaptureFixture[str]) -> None:
    configure_logging(load_settings(FrontendSettings, []), "test", rank=3)
    with structlog.contextvars.bound_contextvars(request_id="r"):
        structlog.get_logger().info("event")
        structlog.get_logger().debug("unseen")
    (line,) = capfd.readouterr().err.splitlines()
    values = json.loads(line)
    assert values.pop("timestamp")
    assert values == {
        "service": "test",
        "rank": 3,
        "request_id": "r",
        "event": "event",
        "level": "info",
    }
