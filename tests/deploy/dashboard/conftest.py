"""The dashboard's process alone, in front of a frontend whose tokens can be worked out by hand."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest

from deploy.health import SERVING, http_health
from deploy.ports import free_port
from deploy.stack import SERVICES, Stack
from tests.client.fake_server import FakeServer, running_server
from tests.deploy.conftest import plan
from tests.stack import ROOT
from tests.waiting import wait_for


def stack_in(directory: Path, frontend_port: int = 1, **facts: Any) -> Stack:
    stack, _ = plan(directory=directory, port=frontend_port)
    return replace(stack, services=SERVICES, **facts)


class Dashboard:
    """A dashboard that serves, and the frontend that it calls."""

    def __init__(self, stack: Stack, frontend: FakeServer) -> None:
        self.host = f"127.0.0.1:{stack.ui_port}"
        self.frontend = frontend

    @contextmanager
    def ask(
        self, path: str, headers: dict[str, str] | None = None, body: bytes | None = None
    ) -> Iterator[httpx2.Response]:
        """The response to a request with these headers, to be read."""
        method = "GET" if body is None else "POST"
        url = f"http://{self.host}{path}"
        with httpx2.stream(method, url, headers=headers, content=body, timeout=60) as answer:
            yield answer


@contextmanager
def running_dashboard(directory: Path, **facts: Any) -> Iterator[Dashboard]:
    with running_server() as frontend:
        port = int(frontend.address.rpartition(":")[2])
        stack = stack_in(directory, port, ui_port=free_port(), **facts)
        stack.save()
        command = [sys.executable, "-m", "deploy.dashboard", str(directory)]
        environment = os.environ | {"NANO_UI_PORT": str(stack.ui_port)}
        process = subprocess.Popen(command, cwd=ROOT, env=environment)
        try:
            wait_for(lambda: http_health(stack.dashboard_url) == SERVING, "the dashboard to serve")
            yield Dashboard(stack, frontend)
        finally:
            process.terminate()
            assert process.wait(60) == 0


@pytest.fixture(scope="module")
def shared_dashboard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dashboard]:
    with running_dashboard(tmp_path_factory.mktemp("dashboard")) as dashboard:
        yield dashboard


@pytest.fixture
def dashboard(shared_dashboard: Dashboard) -> Dashboard:
    """For requests that end by themselves."""
    shared_dashboard.frontend.service.requests.clear()
    return shared_dashboard


@pytest.fixture
def stuck_dashboard(tmp_path: Path) -> Iterator[Dashboard]:
    """A dashboard whose answers never begin."""
    with running_dashboard(tmp_path) as dashboard:
        dashboard.frontend.service.start_together = 99
        yield dashboard
