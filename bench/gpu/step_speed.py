"""Measures whole steps of Qwen3-0.6B, against the GPU's limits, and the time of each kernel."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections import Counter, deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from torch.profiler import ProfilerActivity, profile

from bench.gpu.ceilings_speed import bandwidth, matmul_rate, model_size
from bench.gpu.records import Report
from bench.gpu.setup import Setup
from bench.gpu.steps import blocks_needed, make_step, snapshot
from shared.graph_sizes import NUM_PROMPTS
from worker_svc.model_runner import ModelRunner
from worker_svc.step.arrays import StepArrays

TOP_KERNELS = 12
# The maximum share of the GPU's blocks to use; the workload may need fewer.
CACHE_SHARE = 0.6
# The kinds of trace events that run on the GPU. In a rehearsal, "cpu_op" counts instead.
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")

Lengths = tuple[list[int], list[int]]  # queries and contexts of a step's sequences


class Loaded:
    """The model, with a cache for the largest step and for the reference workload."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        sizes = setup.sizes
        settings = setup.settings(
            max_num_seqs=max(*sizes.batches, sizes.workload.num_seqs),
            max_num_batched_tokens=sizes.max_num_batched_tokens,
            max_model_len=sizes.max_model_len,
        )
        self.runner = ModelRunner(settings, setup.platform(settings))
        self.cases = dict(self._cases())
        size = self.runner.info.paging.block_size
        needed = [blocks_needed(contexts, size) for _, contexts in self.cases.values()]
        info = self.runner.info
        served = min(sizes.cache_tokens // size, int(info.num_blocks * CACHE_SHARE))
        self.num_blocks = max(*needed, served)
        self.graph_tokens = max(info.max_num_batched_tokens, NUM_PROMPTS + 1)
        self.runner.configure(1, self.num_blocks, graph_tokens=self.graph_tokens)
        for cache in self.runner._model.caches:  # products of zeros take less power and are faster
            cache.normal_(generator=setup.generator("caches"))

    def step(self, case: str) -> StepArrays:
        info = self.runner.info
        return make_step(*self.cases[case], info.paging.block_size, info.vocab_size)

    def min_ms(self, case: str, report: Report) -> float:
        """The step's minimum time, at the memory's bandwidth and the matrix product's rate."""
        size, (queries, contexts) = model_size(self.setup), self.cases[case]
        moved = size.weight_bytes + sum(contexts) * size.token_bytes
        by_bytes = moved / bandwidth(self.setup, report) / 1e6
        flops = size.flops(queries, contexts)
        return max(by_bytes, flops / matmul_rate(self.setup, report) / 1e9)

    def _cases(self) -> Sequence[tuple[str, Lengths]]:
        sizes = self.setup.sizes
        context, mixed = sizes.contexts[0], snapshot(sizes.workload)
        rows, tokens = len(mixed) - 1, sizes.prompt_steps[0][1]
        return [
            *((f"{rows} x {context}", ([1] * rows, [context] * rows)) for rows in sizes.batches),
            (f"{len(mixed)} mixed", ([1] * len(mixed), mixed)),
            (f"{rows} + {tokens} of a prompt", ([1] * rows + [tokens], [*mixed[:-1], tokens])),
            *(
                (f"{n} x {tokens} tokens", ([tokens] * n, [tokens] * n))
                for n, tokens in sizes.prompt_steps
            ),
        ]


@pytest.fixture(scope="module")
def loaded(setup: Setup) -> Loaded:
    return Loaded(setup)


# Cases are numbered here, because their names depend on sizes, see `Loaded`.
@pytest.mark.parametrize("number", range(7))
def measure_step(setup: Setup, report: Report, loaded: Loaded, number: int) -> None:
    """Launches steps one ahead, as the service does. Then profiles a few steps for the times of the
    kernels alone."""
    names = list(loaded.cases)
    if number >= len(names):
        pytest.skip("a rehearsal has fewer steps")
    case, runner = names[number], loaded.runner
    step = loaded.step(case)
    few = setup.sizes.few
    for _ in range(few):
        runner.run(step)
    pending, launches, seconds = deque([runner.launch(step)]), [], []
    started = time.perf_counter()
    for _ in range(setup.sizes.repeats):
        before = time.thread_time()
        pending.append(runner.launch(step))
        launches.append(time.thread_time() - before)
        seconds.append(pending.popleft().wait().seconds)
    each_ms = 1e3 * (time.perf_counter() - started) / len(seconds)
    pending.pop().wait()
    events = [event for event in trace(setup, loaded, case) if _counts(setup, event)]
    assert events, "the profiler saw nothing of the device"
    times: Counter[str] = Counter()
    for event in events:
        times[event["name"]] += event["dur"] / few
    kernels_ms = times.total() / 1e3
    min_ms = loaded.min_ms(case, report)
    report.figure(f"step, {case}: on the GPU", 1e3 * statistics.median(seconds), "ms", min_ms)
    report.figure(f"step, {case}: its kernels", kernels_ms, "ms", min_ms)
    report.figure(f"step, {case}: back to back", each_ms, "ms", kernels_ms)
    report.figure(f"step, {case}: launch on the CPU", 1e6 * statistics.median(launches), "us")
    report.figure(f"step, {case}: launches", len(events) / few, "kernels")
    report.detail(f"{case}: us of a step", dict(times.most_common(TOP_KERNELS)))
    total = times.total() or 1.0
    top = ", ".join(f"{100 * us / total:.0f} % {name[:40]}" for name, us in times.most_common(3))
    report.note(f"{case}: {top} ({runner.info.attention_backend})")


def trace(setup: Setup, loaded: Loaded, case: str) -> list[dict[str, Any]]:
    """Records the events of a few steps, in Chrome's format."""
    activities = [ProfilerActivity.CPU]
    if setup.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    step = loaded.step(case)
    with profile(activities=activities) as found:
        pending = [loaded.runner.launch(step) for _ in range(setup.sizes.few)]
        for each in pending:
            each.wait()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "trace.json")
        found.export_chrome_trace(str(path))
        events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return events


def _counts(setup: Setup, event: dict[str, Any]) -> bool:
    kinds = ("cpu_op",) if setup.rehearse else _ON_GPU
    return event.get("cat") in kinds and event.get("ph") == "X"
