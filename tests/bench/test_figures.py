"""The workload, and the figures that are computed from what clients and the engine saw."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from grpc import aio

from bench.http2 import Http2Connection
from bench.http_mode import METHOD
from bench.instant_worker import Sizes, running_scheduler
from bench.load_mode import Goals, arrivals, summarize_load
from bench.metrics import Trace, summarize
from bench.quality import interval
from bench.stack import (
    EngineStats,
    measure_single_stream,
    run_request,
    run_stack,
    stats_reader,
)
from bench.workload import (
    BenchError,
    Shape,
    WorkloadRequest,
    check_fits,
    reference_workload,
    warm_up_request,
)
from nano_vllm_grpc import AsyncLLM
from shared.pb import scheduler_pb2
from shared.pb.scheduler_pb2_grpc import (
    SchedulerServiceServicer,
    add_SchedulerServiceServicer_to_server,
)
from tests.client.fake_server import FakeServer
from tests.http2 import DATA, HEADERS, PING, frame

SCALED = Shape(num_seqs=32, min_input=32, max_input=256, min_output=32, max_output=256)


# The workload.


@pytest.mark.parametrize(("shape", "total"), [(Shape(), 133_966), (SCALED, 4_975)])
def test_output_tokens_of_the_reference_workloads(shape: Shape, total: int) -> None:
    assert sum(r.output_len for r in reference_workload(shape, 151_936)) == total


def test_the_workload_equals_nano_vllms() -> None:
    # The two statements of nano-vLLM's bench.py, with the global generator, as there.
    random.seed(0)
    prompts = [
        [random.randint(0, 10000) for _ in range(random.randint(100, 1024))] for _ in range(256)
    ]
    lengths = [random.randint(100, 1024) for _ in range(256)]
    ours = reference_workload(Shape(), 151_936)
    assert [r.prompt for r in ours] == prompts
    assert [r.output_len for r in ours] == lengths


def test_a_small_vocabulary_changes_ids_but_not_lengths() -> None:
    small, large = reference_workload(SCALED, 1536), reference_workload(SCALED, 151_936)
    assert max(max(r.prompt) for r in small) < 1536
    assert [(len(r.prompt), r.output_len) for r in small] == [
        (len(r.prompt), r.output_len) for r in large
    ]
    warm_up = warm_up_request(SCALED, 1536)
    assert all(r.prompt[:4] != warm_up.prompt[:4] for r in small)


def test_an_error_about_too_long_requests_names_the_flags() -> None:
    requests = [WorkloadRequest([1] * 30, 10, 0), WorkloadRequest([1] * 20, 21, 0)]
    check_fits(requests, 41)
    with pytest.raises(BenchError, match=r"41 tokens.*allows 40.*--max-input or --max-output"):
        check_fits(requests, 40)


def test_arrivals_are_a_poisson_process_that_can_be_repeated() -> None:
    times = arrivals(50.0, 200.0, seed=3)
    assert times == sorted(arrivals(50.0, 200.0, seed=3))
    assert times != arrivals(50.0, 200.0, seed=4)
    assert len(times) == pytest.approx(10_000, abs=5 * math.sqrt(10_000))
    gaps = [after - before for before, after in itertools.pairwise(times)]
    longer = sum(gap > 1 / 50 for gap in gaps) / len(gaps)
    assert longer == pytest.approx(math.exp(-1), abs=0.025)  # of a constant rate it would be 0


# What clients saw.


def test_a_chunk_of_k_tokens_counts_as_k_gaps_of_a_kth() -> None:
    trace = Trace(5, sent=1.0, arrivals=[(1.5, 1), (1.7, 1), (2.3, 3)])
    assert trace.ttft_s == 0.5
    assert trace.inter_token_latencies_s() == pytest.approx([0.2, 0.2, 0.2, 0.2])
    assert summarize([Trace(1, 0.0, [(1.0, 1)])]).itl_p99_s is None


def test_summary_of_two_requests() -> None:
    traces = [
        Trace(10, sent=0.0, arrivals=[(1.0, 1), (2.0, 1), (5.0, 1)]),
        Trace(30, sent=1.0, arrivals=[(4.0, 1)]),
    ]
    metrics = summarize(traces)
    assert (metrics.requests, metrics.prompt_tokens, metrics.output_tokens) == (2, 40, 4)
    assert metrics.duration_s == 5.0
    assert metrics.output_tokens_per_s == pytest.approx(4 / 5)
    assert metrics.total_tokens_per_s == pytest.approx(44 / 5)
    assert (metrics.ttft_p50_s, metrics.itl_p50_s) == (2.0, 2.0)
    assert metrics.itl_p99_s == pytest.approx(1 + 0.99 * 2)


def test_only_requests_that_meet_both_goals_are_good() -> None:
    quick = Trace(4, sent=0.0, arrivals=[(1.0, 1), (1.2, 2)])
    late = Trace(4, sent=0.0, arrivals=[(3.0, 1), (3.2, 2)])
    halting = Trace(4, sent=0.0, arrivals=[(1.0, 1), (4.0, 2)])
    load = summarize_load([quick, late, halting], 2.0, Goals(ttft_s=2.0, itl_s=0.5))
    assert [load[n] for n in ("offered_rate", "achieved_rate", "goodput")] == [1.5, 0.75, 0.25]


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


async def test_stats_cover_the_run_without_its_warm_up(server: FakeServer) -> None:
    scheduler = aio.server()
    add_SchedulerServiceServicer_to_server(BusyScheduler(), scheduler)
    port = scheduler.add_insecure_port("127.0.0.1:0")
    await scheduler.start()
    read_stats = stats_reader(server.address, f"127.0.0.1:{port}")
    requests = [WorkloadRequest([5, 6], 7, 0), WorkloadRequest([8], 3, 1)]
    async with AsyncLLM(server.address) as llm:
        run = await run_stack(llm, WorkloadRequest([1], 2, 0), requests, read_stats)
    await scheduler.stop(None)
    assert run.stats == EngineStats(10, 40, 50, 0, 3)
    assert (run.stats.mean_batch, run.stats.mean_step_tokens) == (4.0, 5.0)
    assert [t.output_tokens for t in run.traces] == [7, 3]  # the warm-up is not counted
    sampling = server.service.requests[-1].sampling
    assert sampling.temperature == pytest.approx(0.6)
    assert sampling.ignore_eos


async def test_a_server_that_stops_early_is_not_measured() -> None:
    class ShortLLM:
        async def stream(self, *_: object) -> AsyncIterator[SimpleNamespace]:
            yield SimpleNamespace(token_ids=[7] * 8)

    llm: Any = ShortLLM()
    with pytest.raises(BenchError, match="8 tokens instead of 9"):
        await run_request(llm, WorkloadRequest([5], 9, 0))


async def test_prompts_of_single_streams_are_never_in_the_cache(server: FakeServer) -> None:
    async with AsyncLLM(server.address) as llm:
        await measure_single_stream(llm, await llm.get_model())
        sent = server.service.requests
        assert [len(r.token_ids.ids) for r in sent] == [32, 1024] * 3
        assert len({tuple(r.token_ids.ids[:8]) for r in sent}) == 6
        server.service.max_model_len = 1024
        with pytest.raises(BenchError, match="needs 1025 tokens; the server allows 1024"):
            await measure_single_stream(llm, await llm.get_model())


# The frontend's and the scheduler's clients.


class FakeTransport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.written = b""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data


async def test_frames_and_reads_may_cut_messages_anywhere() -> None:
    transport = FakeTransport()
    connection = Http2Connection("here", METHOD)
    connection.connection_made(transport)
    received: list[bytes] = []
    ended = connection.call(b"", received.append)
    messages = b"".join(b"\0" + len(m).to_bytes(4, "big") + m for m in (b"one", b"", b"three"))
    parts = [frame(DATA, part, stream=1) for part in (messages[:2], messages[2:])]
    wire = b"".join(parts) + frame(PING, b"12345678")
    for byte in wire:
        assert not ended.done()
        connection.data_received(bytes([byte]))
    connection.data_received(frame(HEADERS, b"trailers", flags=5, stream=1))
    assert received == [b"one", b"", b"three"]
    assert ended.done()
    assert transport.written.endswith(frame(PING, b"12345678", flags=1))  # a ping is answered
    lost = connection.call(b"", received.append)
    connection.connection_lost(None)
    with pytest.raises(ConnectionError, match="closed the connection"):
        await lost


async def test_the_error_of_a_failed_scheduler_has_its_log() -> None:
    # The settings do not allow a step to have fewer tokens than sequences.
    sizes = Sizes(max_num_seqs=8, max_num_batched_tokens=4, max_model_len=64, num_blocks=64)
    with pytest.raises(BenchError, match=r"scheduler_svc ended:\n.*max_num_seqs: 8 sequences"):
        async with running_scheduler(sizes):
            pass


@pytest.mark.parametrize("share", [0.3, 0.98])
def test_the_interval_of_a_mean_covers_it(share: float) -> None:
    rng = np.random.default_rng(3)
    covered = 0
    for seed in range(200):
        low, high = interval(rng.binomial(40, share, size=80) / 40, seed)
        covered += low <= share <= high
    assert covered / 200 == pytest.approx(0.95, abs=0.05)
