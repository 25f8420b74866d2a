"""The reference workload: through the stack, in one process, and with nano-vLLM."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
from functools import cached_property, partial
from typing import Any

from bench.engine_stats import stats_reader
from bench.gpu_check.parts import PartPlan
from bench.gpu_check.peer import round_of
from bench.gpu_check.records import Report, SkipPart
from bench.gpu_check.setup import Setup
from bench.in_process import InProcessEngine
from bench.run import Run
from bench.single_stream import measure_single_stream
from bench.stack import run_stack
from bench.workload import reference_workload, warm_up_request
from frontend.client import AsyncLLM, EngineCapacity, ModelInfo, PrivateStack, SamplingParams
from worker_svc.attention.base import AttentionShape
from worker_svc.config import load_model_config

TARGET = 25_000.0  # output tokens/s through the stack
SINGLE_STREAM_TARGET = 1_000.0
SPLIT_TARGET = 0.95
PEER_TARGET = 1.3
ROUNDS = 2
PEER_LIMIT_S = 100.0
MAX_WAITING = 4096
# Of the GPU's memory, where that is less than the cache of the workload.
CACHE_SHARE = 0.6


def parts(setup: Setup) -> list[PartPlan[Setup]]:
    engine = EngineSettings(setup)
    return [
        PartPlan("stack", partial(measure_stack, engine=engine), limit_s=110),
        # Before ours, which then holds its memory to the end of this process.
        PartPlan("nano-vLLM", measure_peer, limit_s=PEER_LIMIT_S + 5),
        PartPlan("in process", partial(measure_in_process, engine=engine), limit_s=90),
    ]


class EngineSettings:
    """The same for the stack and in process, so that both plan the same steps."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup

    @cached_property
    def variables(self) -> dict[str, Any]:
        """Of `make up`."""
        setup, sizes = self._setup, self._setup.sizes
        settings = setup.settings(setup.model)
        platform = setup.platform(settings)
        config = load_model_config(setup.model)
        dtype = platform.choose_dtype(settings.dtype, config.dtype)
        shape = AttentionShape(
            config.num_layers,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            dtype,
            setup.device,
        )
        block_size = platform.attention_backend(settings, shape).block_size
        memory = platform.cache_bytes(settings, 0) * CACHE_SHARE
        tokens = min(sizes.cache_tokens, int(memory / shape.cache_bytes_per_token))
        return {
            "device": settings.device,
            "dtype": settings.dtype,
            "max_num_seqs": sizes.workload.num_seqs,
            "max_num_batched_tokens": sizes.max_num_batched_tokens,
            "max_model_len": sizes.max_model_len,
            "max_waiting": MAX_WAITING,
            "block_size": block_size,
            "kv_blocks": tokens // block_size,
        }

    def model_info(self, vocab_size: int) -> ModelInfo:
        """What the stack would say of itself."""
        values = self.variables
        capacity = EngineCapacity(
            num_blocks=values["kv_blocks"],
            block_size=values["block_size"],
            max_num_seqs=values["max_num_seqs"],
            max_num_batched_tokens=values["max_num_batched_tokens"],
            max_waiting=values["max_waiting"],
            tensor_parallel_size=1,
        )
        name, longest = self._setup.model.name, values["max_model_len"]
        return ModelInfo(name, longest, vocab_size, [], SamplingParams(), capacity)


def measure_stack(setup: Setup, report: Report, engine: EngineSettings) -> None:
    rate, single = asyncio.run(_run_stack(setup, report, engine))
    report.figure("stack", rate, "tokens/s", TARGET, 1.0)
    report.figure("one stream", single, "tokens/s", SINGLE_STREAM_TARGET, 1.0)


async def _run_stack(setup: Setup, report: Report, engine: EngineSettings) -> tuple[float, float]:
    shape = setup.sizes.workload
    rates = []
    with tempfile.TemporaryDirectory() as directory:
        address = f"unix:{directory}/scheduler.sock"
        with PrivateStack(setup.model, scheduler_address=address, **engine.variables) as stack:
            async with AsyncLLM(stack.address) as llm:
                model = await llm.get_model()
                warm_up = warm_up_request(shape, model.vocab_size)
                requests = reference_workload(shape, model.vocab_size)
                for number in range(ROUNDS):
                    run = await run_stack(
                        llm,
                        warm_up,
                        round_of(requests, number, model.vocab_size),
                        stats_reader(stack.address, address),
                        lambda tokens: None,
                    )
                    rates.append(run.metrics.output_tokens_per_s)
                    report.detail(f"round {number}", _figures(run))
                single = await measure_single_stream(llm, model)
    assert single.single_stream_tokens_per_s is not None
    report.detail("one stream", dataclasses.asdict(single))
    return statistics.median(rates), single.single_stream_tokens_per_s


def measure_in_process(setup: Setup, report: Report, engine: EngineSettings) -> None:
    os.environ["NANO_DEVICE"] = engine.variables["device"]
    os.environ["NANO_DTYPE"] = engine.variables["dtype"]
    vocab_size = load_model_config(setup.model).vocab_size
    running = InProcessEngine(str(setup.model), engine.model_info(vocab_size))
    shape = setup.sizes.workload
    requests = reference_workload(shape, vocab_size)
    warm_up = warm_up_request(shape, vocab_size)

    async def run() -> list[float]:
        rates = []
        for number in range(ROUNDS):
            found = await running.run(
                warm_up, round_of(requests, number, vocab_size), lambda tokens: None
            )
            rates.append(found.metrics.output_tokens_per_s)
            report.detail(f"round {number}", _figures(found))
        return rates

    rate = statistics.median(asyncio.run(run()))
    report.figure("in process", rate, "tokens/s")
    if stack := report.value("stack"):
        report.figure("stack / in process", stack, "tokens/s", rate, SPLIT_TARGET)


def measure_peer(setup: Setup, report: Report) -> None:
    """On the same GPU, with the same lengths, as its bench.py does."""
    if setup.peer is None:
        raise SkipPart("no checkout of nano-vLLM, see --peer")
    command = [sys.executable, "-m", "bench.gpu_check.peer", str(setup.peer), str(setup.model)]
    try:
        done = subprocess.run(
            [*command, str(ROUNDS)], capture_output=True, text=True, timeout=PEER_LIMIT_S
        )
    except subprocess.TimeoutExpired as error:
        raise SkipPart(f"nano-vLLM took over {PEER_LIMIT_S:.0f} s") from error
    if done.returncode:
        report.detail("stderr", done.stderr[-4000:])
        raise SkipPart(f"nano-vLLM failed: {done.stderr.strip().splitlines()[-1:]}")
    rates = json.loads(done.stdout.splitlines()[-1])
    report.detail("rounds", rates)
    rate = statistics.median(rates)
    report.figure("nano-vLLM", rate, "tokens/s")
    if stack := report.value("stack"):
        report.figure("stack / nano-vLLM", stack, "tokens/s", rate, PEER_TARGET)


def _figures(run: Run) -> dict[str, Any]:
    stats = dataclasses.asdict(run.stats) if run.stats else {}
    return dataclasses.asdict(run.metrics) | stats
