from __future__ import annotations

from collections.abc import Iterator

import pytest

from nano_vllm_grpc import LLM
from tests.client.fake_server import FakeServer, FakeService, running_server


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with running_server() as running:
        yield running


@pytest.fixture
def service(server: FakeServer) -> FakeService:
    return server.service


@pytest.fixture
def llm(server: FakeServer) -> Iterator[LLM]:
    with LLM(server.address) as client:
        yield client
