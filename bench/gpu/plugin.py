"""The pytest plugin of a run: records outcomes, and provides the measurements' fixtures.

pytest-xdist runs tests in workers. The process that started them records how each test ended,
because it sees a worker crash. Only the fixtures import torch.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from bench.gpu.records import Report, append
from bench.gpu.run import VARIABLE
from shared.process.death_signal import end_with_parent
from worker_svc.errors import is_device_lost

if TYPE_CHECKING:
    from bench.gpu.setup import Setup

MAX_MESSAGE = 8000  # characters
EXIT_DEVICE_LOST = 70


def pytest_configure(config: pytest.Config) -> None:
    end_with_parent(os.getppid())
    if hasattr(config, "workerinput"):
        os.dup2(2, 1)  # pytest-xdist discards a worker's stdout
        config.pluginmanager.register(Worker())
    else:
        config.pluginmanager.register(Controller(_records()))


class Controller:
    """Records the collected tests, and how each ended."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._collected = False

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Lets a command to a worker that has just died fail silently. Its death is told next, and
        then its tests are given to others; without this, pytest-xdist ends the run (3.8)."""
        send = node.sendcommand

        def send_if_alive(name: str, **arguments: object) -> None:
            with suppress(OSError):
                send(name, **arguments)

        node.sendcommand = send_if_alive

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        if not self._collected:  # every worker collects all tests
            self._collected = True
            for test in ids:
                append(self._path, test=test, outcome="not run")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            message = report.longreprtext[-MAX_MESSAGE:]
            append(self._path, test=report.nodeid, outcome="failed", message=message)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        # pytest-xdist reports a worker's end as `when="???"`.
        crashed = report.when not in ("setup", "call", "teardown")
        message = report.longreprtext[-MAX_MESSAGE:]
        if isinstance(report.longrepr, tuple):
            message = report.longrepr[2].removeprefix("Skipped: ")
        append(
            self._path,
            test=report.nodeid,
            outcome="crashed" if crashed else report.outcome,
            message=message,
            seconds=report.duration,
            properties=dict(report.user_properties),
        )


class Worker:
    """Ends this process once it has lost the GPU. Every later test in this process would fail, so
    pytest-xdist continues with another process."""

    def __init__(self) -> None:
        self._lost = False

    def pytest_runtest_makereport(self, call: pytest.CallInfo[Any]) -> None:
        if call.excinfo is not None and is_device_lost(call.excinfo.value):
            self._lost = True

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self, item: pytest.Item, nextitem: pytest.Item | None) -> None:
        """Frees the GPU memory of a file's tests before the tests of another file."""
        torch = sys.modules.get("torch")
        ends = nextitem is None or nextitem.path != item.path
        if ends and torch is not None and torch.cuda.is_initialized() and not self._lost:
            gc.collect()
            torch.cuda.empty_cache()

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logfinish(self) -> None:
        if self._lost:
            os._exit(EXIT_DEVICE_LOST)


def _given() -> dict[str, Any]:
    given: dict[str, Any] = json.loads(os.environ[VARIABLE])
    return given


def _records() -> Path:
    return Path(_given()["records"])


@pytest.fixture
def report(request: pytest.FixtureRequest) -> Report:
    """Reports the test's measurements."""
    return Report(_records(), request.node.nodeid)


@pytest.fixture(scope="session")
def setup() -> Setup:
    """The device and the sizes for measurements."""
    from bench.gpu.setup import Setup

    paths: dict[str, Any] = {name: Path(path) for name, path in _given()["paths"].items()}
    return Setup(**paths, **_given()["setup"])
