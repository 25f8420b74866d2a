"""The pytest plugin in a module's process: writes a line of JSON whenever a test starts or ends,
and provides the measurements' fixtures. It imports torch only for those."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import pytest

from bench.gpu.records import Journal, Outcome, Report
from bench.gpu.runner import EXIT_DEVICE_LOST, STACKS_SIGNAL
from shared.process.death_signal import end_with_parent
from worker_svc.errors import is_device_lost

if TYPE_CHECKING:
    from bench.gpu.setup import Setup

LONGEST_MESSAGE = 8000


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--gpu", type=json.loads, default="{}", metavar="JSON", help="what bench.gpu tells a module"
    )


def pytest_configure(config: pytest.Config) -> None:
    given = config.getoption("--gpu")
    if "journal" in given:
        end_with_parent(os.getppid())
        faulthandler.register(STACKS_SIGNAL)
    journal = Journal(given.get("journal") or os.memfd_create("journal"))
    config.pluginmanager.register(Recorder(journal, given.get("module", "")), "recorder")


class Recorder:
    """Runs the tests that have no record yet."""

    def __init__(self, journal: Journal, module: str) -> None:
        self._journal = journal
        self._module = module
        self._reports: list[pytest.TestReport] = []
        self._lost = False

    def report(self, test: str) -> Report:
        return Report(self._journal, self._module, test)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        records = self._journal.of(self._module)
        if records.planned is None:
            tests = [item.nodeid for item in items]
            self._journal.write(self._module, "plan", tests=tests)
        items[:] = [item for item in items if item.nodeid not in records.tests]

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        timeout = item.get_closest_marker("timeout")
        limit_s = timeout.args[0] if timeout and timeout.args else None
        self._reports = []
        self._journal.write(self._module, "start", test=item.nodeid, limit_s=limit_s)
        started = time.monotonic()
        result = yield
        outcome, message = _outcome(self._reports)
        self._journal.write(
            self._module,
            "end",
            test=item.nodeid,
            outcome=outcome,
            message=message,
            seconds=time.monotonic() - started,
            properties=dict(item.user_properties),
        )
        if self._lost:  # every later test would fail, and so may the end of this process
            sys.stdout.flush()
            os._exit(EXIT_DEVICE_LOST)
        return result

    def pytest_runtest_makereport(self, call: pytest.CallInfo[Any]) -> None:
        if call.excinfo is not None and is_device_lost(call.excinfo.value):
            self._lost = True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._reports.append(report)


def _outcome(reports: list[pytest.TestReport]) -> tuple[Outcome, str]:
    """The combined outcome of setup, call and teardown, and the reason."""
    failed = [report for report in reports if report.failed]
    if failed:
        texts = [f"{report.when}: {report.longreprtext}" for report in failed]
        return "failed", "\n".join(texts)[-LONGEST_MESSAGE:]
    for report in reports:
        if report.skipped:
            reason = getattr(report, "wasxfail", None)
            if reason is None and isinstance(report.longrepr, tuple):
                reason = report.longrepr[2]
            return "skipped", str(reason).removeprefix("Skipped: ")
    return "passed", ""


@pytest.fixture
def report(request: pytest.FixtureRequest) -> Report:
    """Receives the test's measurements."""
    recorder = request.config.pluginmanager.get_plugin("recorder")
    assert isinstance(recorder, Recorder)
    return recorder.report(request.node.nodeid)


@pytest.fixture(scope="session")
def setup(pytestconfig: pytest.Config) -> Setup:
    """The device and the sizes for measurements."""
    from bench.gpu.setup import make_setup

    return make_setup(**pytestconfig.getoption("--gpu").get("setup", {}))
