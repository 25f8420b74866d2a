from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.__main__ import main
from tests.client.fake_server import FakeServer, running_server

Bench = Callable[..., dict[str, Any]]


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with running_server() as running:
        running.service.max_model_len = 4096
        yield running


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """Runs `python -m bench` with these words, which ends with `status`; returns its JSON."""

    def run(words: str, status: int = 0) -> dict[str, Any]:
        out = tmp_path / "bench.json"
        assert main([*words.split(), "--out", str(out)]) == status
        found: dict[str, Any] = json.loads(out.read_text())
        assert found["machine"]["cores"] >= 1
        assert found["versions"]["torch"]
        assert found["date"]
        assert "commit" in found
        return found

    return run
