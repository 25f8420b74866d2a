"""First-token times, from frontends' metrics."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Histogram, start_http_server

from deploy.dashboard.samples import Sampler

from .conftest import stack_in


@pytest.fixture
def frontends(tmp_path: Path) -> Iterator[list[Histogram]]:
    """The first-token times of two frontends, at addresses that files name."""
    (tmp_path / "metrics").mkdir()
    times = []
    with ExitStack() as servers:
        for index in range(2):
            registry = CollectorRegistry()
            name = "nanovllm:time_to_first_token_seconds"
            times.append(Histogram(name, "of a frontend", ["model_name"], registry=registry))
            server, _ = start_http_server(0, "127.0.0.1", registry)
            servers.callback(server.server_close)
            servers.callback(server.shutdown)
            targets = [{"targets": [f"127.0.0.1:{server.server_port}"]}]
            file = tmp_path / "metrics" / f"frontend-{index}.json"
            file.write_text(json.dumps(targets))
        yield times


def observe(times: Histogram, *values: float) -> None:
    for value in values:
        times.labels("demo").observe(value)


def test_first_token_times_are_those_since_the_last_sample(
    tmp_path: Path, frontends: list[Histogram]
) -> None:
    sampler = Sampler(stack_in(tmp_path))
    one, other = frontends
    observe(one, 5.0, 5.0)
    assert sampler.take()["first_token_s"] is None  # who knows since when
    assert sampler.take()["first_token_s"] is None
    observe(one, 0.5)
    observe(other, 0.25, 0.5, 0.75)
    assert sampler.take()["first_token_s"] == 0.5
    one.clear()  # it died
    observe(other, 2.0)
    assert sampler.take()["first_token_s"] == 2.0
    assert "running" not in sampler.take()  # there is no scheduler
