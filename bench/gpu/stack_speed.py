"""Measures the reference workload and one stream on the three services, and on another server."""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest
import torch

from bench.gpu.ceilings_speed import bandwidth, model_size, workload_bound
from bench.gpu.client import Job
from bench.gpu.peer import VLLM
from bench.gpu.records import Report
from bench.gpu.setup import Setup
from nano_vllm_grpc import PrivateStack

# Shares of the bounds. A single stream waits for launches, not for bytes.
TARGET = 0.78
SINGLE_STREAM_TARGET = 0.28
PEER_TARGET = 1.5
PEER_ROUNDS = 2
PEER_LIMIT_S = 350.0  # vLLM compiles as it starts


def measure_stack(setup: Setup, report: Report) -> None:
    """Measures the workload, then one stream, then a kill of the worker amid a few."""
    serving = setup.serving()
    report.detail("setting", serving)
    # The bounds are measured before the stack starts, because it shares the GPU.
    bound = workload_bound(setup, report)
    single_bound = 1e9 * bandwidth(setup, report) / model_size(setup).weight_bytes
    if setup.device.type == "cuda":
        torch.cuda.empty_cache()
    rates: list[float] = []
    found: dict[str, Any] = {}
    for line in _client(setup, serving, setup.sizes.stream_repeats):
        found |= line
        report.detail(line["name"], line)
        if "output_tokens_per_s" in line:
            rates.append(line["output_tokens_per_s"])
    rate = statistics.median(rates)
    report.figure("stack", rate, "tokens/s", bound, TARGET)
    single = found["single_stream_tokens_per_s"]
    report.figure("one stream", single, "tokens/s", single_bound, SINGLE_STREAM_TARGET)
    pauses = [pause for pause in found["pauses_s"] if pause is not None]
    report.figure("killed worker: longest pause", max(pauses, default=math.nan), "s")


def measure_stack_without_drafts(setup: Setup, report: Report) -> None:
    serving = setup.serving() | {"speculation": "none"}
    rounds = list(_client(setup, serving, stream_repeats=0))
    report.detail("rounds without drafts", rounds)
    rate = statistics.median(found["output_tokens_per_s"] for found in rounds)
    report.figure("stack, SPECULATION=none", rate, "tokens/s", report.value("stack"))


@pytest.mark.timeout(PEER_LIMIT_S + 20)
def measure_peer(setup: Setup, report: Report) -> None:
    """Measures another server on this GPU with equal lengths."""
    if setup.peer is None:
        pytest.skip("no peer, see --peer")
    peer, name = str(setup.peer), "nano-vLLM"
    if setup.peer.name == VLLM and not setup.peer.exists():
        peer, name = VLLM, "vLLM"
    command = [sys.executable, "-m", "bench.gpu.peer", peer, str(setup.model)]
    try:
        done = subprocess.run(
            [*command, str(PEER_ROUNDS)], capture_output=True, text=True, timeout=PEER_LIMIT_S
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"{name} took over {PEER_LIMIT_S:.0f} s")
    if done.returncode:
        report.detail("stderr", done.stderr[-4000:])
        pytest.skip(f"{name} failed: {done.stderr.strip().splitlines()[-1:]}")
    rates = json.loads(done.stdout.splitlines()[-1])
    report.detail("rounds", rates)
    rate = statistics.median(rates)
    report.figure(name, rate, "tokens/s")
    if stack := report.value("stack"):
        report.figure(f"stack / {name}", stack, "tokens/s", rate, PEER_TARGET)


def _client(setup: Setup, serving: dict[str, Any], stream_repeats: int) -> Iterator[dict[str, Any]]:
    """Yields the lines that the client of a private stack prints."""
    sizes = setup.sizes
    with tempfile.TemporaryDirectory() as directory:
        address = f"unix:{directory}/scheduler.sock"
        with PrivateStack(
            setup.model, scheduler_address=address, frontends=sizes.clients, **serving
        ) as stack:
            job = Job(
                stack.address,
                address,
                asdict(sizes.workload),
                sizes.clients,
                sizes.rounds,
                stream_repeats,
            )
            command = [sys.executable, "-m", "bench.gpu.client", json.dumps(asdict(job))]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
                assert client.stdout is not None
                yield from map(json.loads, client.stdout)
            assert client.returncode == 0, "the client failed; its error is printed above"
