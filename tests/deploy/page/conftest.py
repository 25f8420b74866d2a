"""The page's process alone, in front of a frontend whose tokens can be worked out by hand."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

import pytest

from deploy.health import SERVING, http_health
from deploy.ports import free_port
from deploy.stack import SERVICES, Stack
from tests.client.fake_server import FakeServer, running_server
from tests.stack import ROOT
from tests.waiting import wait_for


def stack_in(directory: Path, frontend_port: int = 1, **facts: Any) -> Stack:
    return Stack(
        directory=directory,
        host="127.0.0.1",
        port=frontend_port,
        services=SERVICES,
        first_rank=0,
        num_ranks=1,
        frontends=1,
        scheduler_address=f"unix:{directory}/scheduler.sock",
        worker_addresses=(f"unix:{directory}/worker-0.sock",),
        drain_timeout_s=1.0,
        **facts,
    )


class Page:
    """A page that serves, and the frontend that it asks."""

    def __init__(self, stack: Stack, frontend: FakeServer) -> None:
        self.host = f"127.0.0.1:{stack.ui_port}"
        self.frontend = frontend

    @contextmanager
    def ask(
        self, path: str, headers: dict[str, str] | None = None, body: bytes | None = None
    ) -> Iterator[HTTPResponse]:
        """The response to a request that has these headers and no others, besides Host."""
        connection = HTTPConnection(self.host, timeout=60)
        connection.putrequest("GET" if body is None else "POST", path, skip_host=True)
        for name, value in ({"host": self.host} | (headers or {})).items():
            connection.putheader(name, value)
        if body is not None:
            connection.putheader("content-length", str(len(body)))
        connection.endheaders(body)
        with closing(connection), connection.getresponse() as answer:
            yield answer


@contextmanager
def running_page(directory: Path, **facts: Any) -> Iterator[Page]:
    with running_server() as frontend:
        port = int(frontend.address.rpartition(":")[2])
        stack = stack_in(directory, port, ui_port=free_port(), **facts)
        stack.save()
        command = [sys.executable, "-m", "deploy.page", str(directory)]
        environment = os.environ | {"NANO_UI_PORT": str(stack.ui_port)}
        process = subprocess.Popen(command, cwd=ROOT, env=environment)
        try:
            wait_for(lambda: http_health(stack.page_url) == SERVING, "the page to serve")
            yield Page(stack, frontend)
        finally:
            process.terminate()
            assert process.wait(60) == 0


@pytest.fixture(scope="module")
def shared_page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with running_page(tmp_path_factory.mktemp("page"), model="demo") as page:
        yield page


@pytest.fixture
def page(shared_page: Page) -> Page:
    """For requests that end by themselves."""
    shared_page.frontend.service.requests.clear()
    return shared_page


@pytest.fixture
def stuck_page(tmp_path: Path) -> Iterator[Page]:
    """A page whose answers do not even begin."""
    with running_page(tmp_path, model="demo") as page:
        page.frontend.service.start_together = 99
        yield page
