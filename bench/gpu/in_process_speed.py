"""Runs the reference workload with scheduler and model in one process, to find the backend and the
number of prompt tokens per step that serve it fastest."""

from __future__ import annotations

import asyncio
import gc
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch

from bench.gpu.records import Report
from bench.gpu.serving import MAX_WAITING, cache_blocks, step_limits, variables
from bench.gpu.setup import BACKENDS, Setup
from bench.gpu.timing import Timer
from bench.in_process import RunnerEngine
from bench.stack import Run
from bench.workload import reference_workload, warm_up_request
from worker_svc.model_runner import ModelRunner
from worker_svc.step.decode import Step
from worker_svc.step_result import PendingStep

FIGURE = "in process"


class StepLog:
    """A model runner that records the number and the time of steps of each kind."""

    def __init__(self, runner: ModelRunner, timer: Timer) -> None:
        self.runner = runner
        self._timer = timer
        self.clear()

    def configure(self, epoch: int, num_blocks: int) -> None:
        self.runner.configure(epoch, num_blocks)

    def clear(self) -> None:
        self._kinds: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        self._marks: list[tuple[str, Any, Any]] = []

    def launch(self, step: Step) -> PendingStep:
        kind = "mixed"
        if step.decodes_only:
            kind = "decodes"
        elif (step.query_lens > 1).all():
            kind = "prompts"
        begin, before = self._timer.mark(), time.thread_time()
        pending = self.runner.launch(step)
        launched = time.thread_time() - before
        self._marks.append((kind, begin, self._timer.mark()))
        found = self._kinds[kind]
        found["steps"] += 1
        found["rows"] += step.num_seqs
        found["tokens"] += step.num_tokens
        found["launch_cpu_s"] += launched
        return pending

    def kinds(self) -> dict[str, dict[str, float]]:
        """Totals by kind of step, once all steps are over. GPU time is the stream's time from a
        step's start to its end, and idle time from there to the start of the next step."""
        for kind, begin, end in self._marks:
            self._kinds[kind]["gpu_s"] += self._timer.between(begin, end)
        for (_, _, end), (kind, begin, _) in pairwise(self._marks):
            self._kinds[kind]["idle_s"] += max(self._timer.between(end, begin), 0.0)
        return {kind: dict(found) for kind, found in self._kinds.items()}


@pytest.fixture
def freed(setup: Setup) -> Iterator[None]:
    """Frees the GPU's memory for the next model, even if the test fails."""
    yield
    gc.collect()
    if setup.device.type == "cuda":
        torch.cuda.empty_cache()


@pytest.mark.usefixtures("freed")
@pytest.mark.parametrize("name", BACKENDS)
def measure_budgets(setup: Setup, report: Report, name: str) -> None:
    """Measures budgets of prompt tokens on one loaded model, because to a worker a budget is only
    the size of the largest step. Runs as many budgets, and rounds of each, as the backend's share
    of the time allows, and at least one."""
    sizes = setup.sizes
    setup.backend(name, sizes.heads[0][1])  # skips the test before a model is loaded
    share_s = sizes.in_process_s / sum(map(setup.has_backend, BACKENDS))
    settings = setup.settings(
        attention=name,
        max_num_seqs=sizes.workload.num_seqs,
        max_num_batched_tokens=max(sizes.prefill_budgets),
        max_model_len=sizes.max_model_len,
    )
    started = time.monotonic()
    log = StepLog(ModelRunner(settings, setup.platform(settings)), setup.timer)
    blocks = cache_blocks(setup, log.runner.info)
    log.runner.configure(1, blocks)
    served = {"attention": name, "kv_blocks": blocks, "block_size": log.runner.info.block_size}
    rates: dict[int, list[float]] = {budget: [] for budget in sizes.prefill_budgets}
    round_s = 0.0
    for budget in list(rates) * sizes.rounds:  # a lack of time costs repetitions first
        began = time.monotonic()
        if any(rates.values()) and began - started + round_s > share_s and not setup.rehearse:
            break
        serving = variables(setup, budget) | served
        run = run_round(setup, log, serving)
        rates[budget].append(run.metrics.output_tokens_per_s)
        case = case_name(name, budget)
        kinds = {"kinds": log.kinds()}
        report.detail(f"{case}, round {len(rates[budget])}", run.figures() | kinds)
        report.detail(f"serving, {case}", serving)
        round_s = time.monotonic() - began
    for budget, found in rates.items():
        if found:
            rate = statistics.median(found)
            report.figure(f"{FIGURE}, {case_name(name, budget)}", rate, "tokens/s")
        else:
            report.note(f"{budget} prompt tokens: no time left")


def measure_best(setup: Setup, report: Report) -> None:
    best = best_case(setup, report)
    assert best, "nothing was measured"
    report.figure(FIGURE, report.value(f"{FIGURE}, {best}"), "tokens/s")
    report.note(best)


def best_case(setup: Setup, report: Report) -> str | None:
    """The name of the measured backend and budget that served fastest; None if none did."""
    cases = [case_name(name, budget) for name in BACKENDS for budget in setup.sizes.prefill_budgets]
    rates = {case: rate for case in cases if (rate := report.value(f"{FIGURE}, {case}"))}
    return max(rates, key=lambda case: rates[case]) if rates else None


def case_name(name: str, budget: int) -> str:
    return f"{name}, {budget} prompt tokens"


def run_round(setup: Setup, log: StepLog, serving: dict[str, Any]) -> Run:
    """Runs the workload once, starting with an empty prefix cache."""
    vocab_size = log.runner.info.vocab_size
    shape = setup.sizes.workload
    limits = step_limits(vocab_size, serving)
    engine = RunnerEngine(log, limits, MAX_WAITING, serving["max_num_prefill_tokens"])
    requests = reference_workload(shape, vocab_size)
    warm_up = warm_up_request(shape, vocab_size)
    return asyncio.run(engine.run(warm_up, requests, lambda tokens: None, log.clear))
