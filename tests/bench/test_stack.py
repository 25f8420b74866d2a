"""The benchmark against a server whose tokens are known."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from grpc import aio

from bench.__main__ import main
from bench.engine_stats import EngineStats, stats_reader
from bench.errors import BenchError
from bench.single_stream import measure_single_stream
from bench.stack import run_request, run_stack
from bench.workload import Request
from nano_vllm_grpc import AsyncLLM
from shared.pb import scheduler_pb2
from shared.pb.scheduler_pb2_grpc import (
    SchedulerServiceServicer,
    add_SchedulerServiceServicer_to_server,
)
from tests.bench.command import status
from tests.client.fake_server import FakeServer
from tests.waiting import WAIT_S

SMALL = ["--num-seqs", "6", "--min-input", "4", "--max-input", "9"]
SMALL += ["--min-output", "5", "--max-output", "20"]


class BusyScheduler(SchedulerServiceServicer):
    """Reports 10 more steps, each of 4 sequences and 5 tokens, every time it is asked."""

    def __init__(self) -> None:
        self._asked = 0

    async def GetLoad(self, request: Any, context: Any) -> scheduler_pb2.GetLoadResponse:
        self._asked += 1
        return scheduler_pb2.GetLoadResponse(
            steps=10 * self._asked,
            step_sequences=40 * self._asked,
            step_tokens=50 * self._asked,
            cached_prompt_tokens=3 * self._asked,
        )


async def test_stats_are_those_of_the_run(server: FakeServer) -> None:
    scheduler = aio.server()
    add_SchedulerServiceServicer_to_server(BusyScheduler(), scheduler)
    port = scheduler.add_insecure_port("127.0.0.1:0")
    await scheduler.start()
    read_stats = stats_reader(server.address, f"127.0.0.1:{port}")
    received: list[int] = []
    requests = [Request([5, 6], 7, 0), Request([8], 3, 1)]
    async with AsyncLLM(server.address) as llm:
        run = await run_stack(llm, Request([1], 2, 0), requests, read_stats, received.append)
    await scheduler.stop(None)

    assert run.stats == EngineStats(10, 40, 50, 0, 3)
    assert (run.stats.mean_batch, run.stats.mean_step_tokens) == (4.0, 5.0)
    assert [t.output_tokens for t in run.traces] == [7, 3]  # the warm-up is not counted
    assert run.metrics.prompt_tokens == 3
    assert sum(received) == 10


async def test_the_sampling_of_the_reference_workload_is_asked_for(server: FakeServer) -> None:
    async with AsyncLLM(server.address) as llm:
        await run_request(llm, Request([5], 4, seed=17))
    sampling = server.service.requests[0].sampling
    assert sampling.temperature == pytest.approx(0.6)
    assert (sampling.ignore_eos, sampling.max_tokens, sampling.seed) == (True, 4, 17)


async def test_a_server_that_stops_early_is_not_measured(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.stack.replace", lambda *_, **__: None)  # 8 tokens by default
    async with AsyncLLM(server.address) as llm:
        with pytest.raises(BenchError, match="8 tokens where 9 were asked"):
            await run_request(llm, Request([5], 9, 0))


async def test_single_stream(server: FakeServer) -> None:
    async with AsyncLLM(server.address) as llm:
        found = await measure_single_stream(llm, await llm.get_model())
    sent = server.service.requests
    assert [len(r.token_ids.ids) for r in sent] == [32, 1024] * 3
    assert len({tuple(r.token_ids.ids[:8]) for r in sent}) == 6  # no prefix is repeated
    assert found.single_stream_tokens_per_s is not None
    assert found.single_stream_tokens_per_s > 0
    assert found.ttft_1024_s is not None
    assert found.ttft_1024_s > 0


async def test_single_stream_needs_a_model_that_is_long_enough(server: FakeServer) -> None:
    server.service.max_model_len = 1024
    async with AsyncLLM(server.address) as llm:
        with pytest.raises(BenchError, match="needs 1025 tokens, the server takes 1024"):
            await measure_single_stream(llm, await llm.get_model())


def test_table_json_and_plot(server: FakeServer, tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    command = [sys.executable, "-m", "bench", "--address", server.address, *SMALL, "--out", out]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    for label in ("output tokens/s", "time to first token p99", "inter-token latency p50"):
        assert label in done.stdout
    assert "n/a" in done.stdout  # for steps, with no scheduler to ask
    found = json.loads(out.read_text())
    for key in ("output_tokens_per_s", "ttft_p50_s", "ttft_p99_s", "itl_p50_s", "itl_p99_s"):
        assert found[key] > 0
    assert {k: found[k] for k in ("mode", "model", "requests", "steps", "split_ratio")} == {
        "mode": "stack",
        "model": "fake",
        "requests": 6,
        "steps": None,
        "split_ratio": None,
    }
    assert found["single_stream_tokens_per_s"] is None
    assert found["workload"]["max_input"] == 9
    assert found["machine"]["cores"] >= 1
    assert found["versions"]["python"] == sys.version.split()[0]
    assert "commit" in found
    assert (tmp_path / "figures.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max-output", "9000"], "--max-output"),
        (["--min-input", "10", "--max-input", "5"], "--min-input"),
        (["--num-seqs", "0"], "--num-seqs"),
        (["--num-seqs", "1", "--in-process"], "--model: is models/demo, the server has fake"),
        (["--address", "127.0.0.1:1"], "UNAVAILABLE: 127.0.0.1:1"),
    ],
)
def test_what_cannot_be_measured_is_a_plain_message(
    server: FakeServer, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert status(main, ["--address", server.address, *flags]) != 0
    assert message in capsys.readouterr().err
