"""Metrics over HTTP, as Prometheus would ask for them."""

from __future__ import annotations

import http.client
import json
import random
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import prometheus_client
import pytest
from prometheus_client.metrics_core import Metric

from frontend.settings import FrontendSettings
from shared.config import load_settings
from shared.telemetry.metrics import Histogram, ServiceMetrics
from shared.telemetry.metrics_endpoint import open_endpoint
from tests.waiting import wait_for

BOUNDS = (0.5, 1.0, 2.5, 10.0)


class Times(ServiceMetrics):
    def __init__(self) -> None:
        super().__init__("/models/Qwen3-0.6B")
        self.times = Histogram(BOUNDS)

    def families(self) -> Iterator[Metric]:
        yield self._histogram("times_seconds", "Times.", self.times, lost="worker")


@pytest.fixture
def metrics() -> Times:
    return Times()


@pytest.fixture
def address(tmp_path: Path, metrics: Times) -> str:
    settings = load_settings(FrontendSettings, ["--metrics-directory", str(tmp_path / "new")])
    endpoint = open_endpoint(settings, "frontend", 3, metrics, engine="b")
    assert endpoint is not None
    endpoint.serve(restarts=7)
    file = tmp_path / "new" / "frontend-3.json"
    wait_for(file.exists, "the thread to write it")
    (entry,) = json.loads(file.read_text())
    assert entry["labels"] == {"service": "frontend", "index": "3", "engine": "b"}
    (found,) = entry["targets"]
    assert isinstance(found, str)
    return found


def get(address: str, path: str = "/metrics") -> tuple[int, str]:
    connection = http.client.HTTPConnection(address, timeout=60)
    connection.request("GET", path)
    response = connection.getresponse()
    return response.status, response.read().decode()


def test_a_histogram_reads_as_prometheus_clients_own(metrics: Times, address: str) -> None:
    registry = prometheus_client.CollectorRegistry()
    theirs = prometheus_client.Histogram(
        "nanovllm:times_seconds",
        "Times.",
        ["model_name", "lost"],
        buckets=BOUNDS,
        registry=registry,
    ).labels("Qwen3-0.6B", "worker")
    for value in (*BOUNDS, *random.Random(0).choices([0.1 * i for i in range(200)], k=100)):
        metrics.times.observe(value)
        theirs.observe(value)
    status, text = get(address)
    assert status == 200
    expected = prometheus_client.generate_latest(registry).decode()
    expected = re.sub("(?m)^.*_created.*\n", "", expected)
    assert expected in text
    assert 'nanovllm:restarts_total{model_name="Qwen3-0.6B"} 7.0\n' in text
    assert "process_start_time_seconds" in text


def test_only_metrics_are_served(address: str) -> None:
    assert get(address, "/")[0] == 404


def test_silent_connections_delay_nobody_and_are_closed(address: str) -> None:
    threads = threading.active_count()
    host, _, port = address.rpartition(":")
    silent = [socket.create_connection((host, int(port))) for _ in range(3)]
    assert get(address)[0] == 200
    assert threading.active_count() == threads
    for each in silent:
        assert each.recv(1) == b""
        each.close()


def test_a_port_that_is_taken_is_named(metrics: Times, address: str) -> None:
    settings = load_settings(FrontendSettings, ["--metrics-address", address])
    with pytest.raises(OSError, match=f"metrics_address: .*{address}"):
        open_endpoint(settings, "frontend", 0, metrics)
