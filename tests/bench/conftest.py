from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.client.fake_server import FakeServer, running_server


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with running_server() as running:
        running.service.max_model_len = 4096
        yield running
