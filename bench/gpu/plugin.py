"""The pytest plugin of a run: records results, and provides the measurements' fixtures.

pytest-xdist runs tests in workers. A worker records the start and the figures of a test. The
process that started the workers records how the test ended, because it sees a worker crash. Only
the fixtures import torch.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from bench.gpu.records import Report, append, read
from shared.process.death_signal import end_with_parent
from worker_svc.errors import is_device_lost

if TYPE_CHECKING:
    from bench.gpu.setup import Setup

VARIABLE = "GPU_CHECK"  # JSON: the records' path, and the arguments of `make_setup`
MAX_MESSAGE = 8000  # characters
EXIT_DEVICE_LOST = 70


def pytest_configure(config: pytest.Config) -> None:
    end_with_parent(os.getppid())
    path = Path(_given()["records"])
    if hasattr(config, "workerinput"):
        os.dup2(2, 1)  # pytest-xdist discards a worker's stdout; stderr is the log
        config.pluginmanager.register(Worker(path))
    else:
        config.pluginmanager.register(Controller(path))


class Controller:
    """Records the collected tests, and how each ended."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._planned: set[str] = set()

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        for test in ids:
            if test not in self._planned:  # else another worker has reported it
                self._planned.add(test)
                append(self._path, test, "planned")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._record(report.nodeid, "collection", report, 0.0)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.user_properties:
            append(self._path, report.nodeid, "details", dict(report.user_properties))
        # pytest-xdist reports a worker's end as `when="???"`.
        when = report.when if report.when in ("setup", "call", "teardown") else "crash"
        self._record(report.nodeid, when, report, report.duration)

    def _record(
        self,
        test: str,
        when: str,
        report: pytest.CollectReport | pytest.TestReport,
        seconds: float,
    ) -> None:
        message = report.longreprtext[-MAX_MESSAGE:]
        if report.skipped and isinstance(report.longrepr, tuple):
            message = report.longrepr[2].removeprefix("Skipped: ")
        value = {"when": when, "outcome": report.outcome, "message": message, "seconds": seconds}
        append(self._path, test, "report", value)


class Worker:
    """Records starts of tests, and ends this process once it has lost the GPU. Every later test in
    this process would fail, so pytest-xdist continues with another process."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._before = {name for name, test in read(path).items() if test.outcome != "not run"}
        self._lost = False

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        if item.nodeid in self._before:  # the test killed a process, and pytest-xdist repeats it
            return True
        append(self._path, item.nodeid, "started")
        return None

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


@pytest.fixture
def report(request: pytest.FixtureRequest) -> Report:
    """Writes the test's measurements."""
    return Report(Path(_given()["records"]), request.node.nodeid)


@pytest.fixture(scope="session")
def setup() -> Setup:
    """The device and the sizes for measurements."""
    from bench.gpu.setup import make_setup

    return make_setup(**_given()["setup"])
