"""First-token times, from frontends' metrics."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from deploy.page.samples import Sampler

from .conftest import stack_in

METRICS = """\
# TYPE nanovllm:time_to_first_token_seconds histogram
nanovllm:time_to_first_token_seconds_bucket{{le="+Inf",model_name="demo"}} {count}
nanovllm:time_to_first_token_seconds_count{{model_name="demo"}} {count}
nanovllm:time_to_first_token_seconds_sum{{model_name="demo"}} {sum}
"""


class Frontend:
    """The metrics of a frontend, at an address that a file names."""

    def __init__(self, file: Path) -> None:
        self.count, self.sum = 0, 0.0
        frontend = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(METRICS.format(**vars(frontend)).encode())

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.01,)).start()
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps([{"targets": [f"127.0.0.1:{self._server.server_port}"]}]))

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def frontends(tmp_path: Path) -> Iterator[list[Frontend]]:
    started = [Frontend(tmp_path / "metrics" / f"frontend-{i}.json") for i in range(2)]
    yield started
    for each in started:
        each.stop()


def test_first_token_times_are_those_since_the_last_sample(
    tmp_path: Path, frontends: list[Frontend]
) -> None:
    sampler = Sampler(stack_in(tmp_path))
    one, other = frontends
    one.count, one.sum = 100, 500.0
    assert sampler.take()["first_token_s"] is None  # who knows since when
    assert sampler.take()["first_token_s"] is None
    one.count, one.sum = 101, 500.5
    other.count, other.sum = 3, 1.5
    assert sampler.take()["first_token_s"] == 0.5
    one.count, one.sum = 0, 0.0  # it died
    other.count, other.sum = 4, 3.5
    assert sampler.take()["first_token_s"] == 2.0
    assert "running" not in sampler.take()  # there is no scheduler
