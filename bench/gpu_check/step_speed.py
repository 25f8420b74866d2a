"""Whole steps of Qwen3-0.6B: how near they come to what the memory allows, and what takes time."""

from __future__ import annotations

import json
import math
import statistics
import time
from functools import cached_property, partial
from typing import Any

from torch.profiler import ProfilerActivity, profile

from bench.gpu_check.decode_speed import copy_rate
from bench.gpu_check.features_speed import measure_features
from bench.gpu_check.parts import PartPlan
from bench.gpu_check.prompt_speed import attention_flops, matmul_rate
from bench.gpu_check.records import Report
from bench.gpu_check.setup import Heads, Setup
from bench.gpu_check.steps import uniform_step
from tools.make_model import tensor_shapes
from worker_svc.model_runner import ModelRunner
from worker_svc.step import Step

TOP_KERNELS = 12
WARM_UPS = 3


def parts(setup: Setup) -> list[PartPlan[Setup]]:
    loaded = Loaded(setup)
    return [
        PartPlan("decodes", partial(measure_decodes, loaded=loaded)),
        PartPlan("prompts", partial(measure_prompts, loaded=loaded)),
        PartPlan("kernels", partial(profile_steps, loaded=loaded)),
        PartPlan("sampling features", measure_features),
    ]


class Loaded:
    """The model with a cache for the largest step, loaded at its first use."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self.context = setup.sizes.speed_contexts[0]

    @cached_property
    def runner(self) -> ModelRunner:
        sizes = self._setup.sizes
        settings = self._setup.settings(
            self._setup.model,
            kv_blocks=1,
            max_num_seqs=max(sizes.speed_batches),
            max_num_batched_tokens=sizes.max_num_batched_tokens,
            max_model_len=sizes.max_model_len,
        )
        runner = ModelRunner(settings, self._setup.platform(settings))
        size = runner.info.block_size
        needs = [(rows, self.context) for rows in sizes.speed_batches] + [*sizes.prompt_steps]
        blocks = max(rows * math.ceil(context / size) for rows, context in needs)
        runner.configure(1, blocks)
        for cache in runner._caches:  # new memory may hold NaN
            cache.normal_(generator=self._setup.generator("caches"))
        return runner

    @cached_property
    def config(self) -> dict[str, Any]:
        text = (self._setup.model / "config.json").read_text(encoding="utf-8")
        config: dict[str, Any] = json.loads(text)
        return config

    @property
    def heads(self) -> Heads:
        keys = ("num_attention_heads", "num_key_value_heads", "head_dim")
        return Heads(*(self.config[key] for key in keys))

    @property
    def layers(self) -> int:
        return int(self.config["num_hidden_layers"])

    def parameters(self, *, head: bool) -> int:
        """That a step multiplies with, those of the output head or not."""
        shapes = tensor_shapes(self.config)
        embedding = math.prod(shapes.pop("model.embed_tokens.weight"))
        shapes.pop("lm_head.weight", None)  # as large
        return sum(map(math.prod, shapes.values())) + (embedding if head else 0)

    def step(self, rows: int, queries: int, context: int) -> Step:
        info = self.runner.info
        return uniform_step(rows, queries, context, info.block_size, info.vocab_size)


def measure_decodes(setup: Setup, report: Report, loaded: Loaded) -> None:
    """Launched without waiting for the one before, as the service does."""
    itemsize = setup.dtype.itemsize
    heads, runner = loaded.heads, loaded.runner
    per_token = 2 * loaded.layers * heads.kv_heads * heads.head_dim * itemsize
    for rows in setup.sizes.speed_batches:
        step = loaded.step(rows, 1, loaded.context)
        for _ in range(WARM_UPS):
            runner.run(step)
        pending, launches = [], []
        started = time.perf_counter()
        for _ in range(setup.sizes.repeats):
            before = time.perf_counter()
            pending.append(runner.launch(step))
            launches.append(time.perf_counter() - before)
        seconds = [each.wait()[1] for each in pending]
        each = (time.perf_counter() - started) / len(pending)
        size = loaded.parameters(head=True) * itemsize + rows * loaded.context * per_token
        bound = size / copy_rate(setup, report) / 1e6
        case = f"batch {rows}, context {loaded.context}"
        report.figure(f"{case}, on the GPU", 1e3 * statistics.median(seconds), "ms", bound)
        report.figure(f"{case}, back to back", 1e3 * each, "ms", bound)
        report.figure(f"{case}, launch on the CPU", 1e6 * statistics.median(launches), "us")
    report.note(runner.info.attention_backend)


def measure_prompts(setup: Setup, report: Report, loaded: Loaded) -> None:
    """Kernel by kernel, as they are served."""
    for rows, tokens in setup.sizes.prompt_steps:
        step = loaded.step(rows, tokens, tokens)
        for _ in range(WARM_UPS):
            loaded.runner.run(step)
        repeats = setup.sizes.repeats // 3 + 1
        seconds = [loaded.runner.launch(step).wait()[1] for _ in range(repeats)]
        flops = 2.0 * loaded.parameters(head=False) * rows * tokens
        flops += rows * loaded.layers * attention_flops(loaded.heads, tokens, tokens)
        bound = flops / matmul_rate(setup, report) / 1e9
        report.figure(f"{rows} x {tokens} tokens", 1e3 * statistics.median(seconds), "ms", bound)


def profile_steps(setup: Setup, report: Report, loaded: Loaded) -> None:
    """The kernels that take longest, microseconds of a step."""
    sizes = setup.sizes
    steps = {
        f"batch {rows}": loaded.step(rows, 1, loaded.context)
        for rows in (min(sizes.speed_batches), max(sizes.speed_batches))
    }
    rows, tokens = sizes.prompt_steps[-1]
    steps[f"{rows} x {tokens} tokens"] = loaded.step(rows, tokens, tokens)
    on_gpu = setup.device.type == "cuda"
    activities = [ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]
    for case, step in steps.items():
        loaded.runner.run(step)
        with profile(activities=activities) as found:
            for _ in range(WARM_UPS):
                loaded.runner.run(step)
        times = {each.key: each.self_device_time_total / WARM_UPS for each in found.key_averages()}
        ordered = sorted(times.items(), key=lambda item: -item[1])[:TOP_KERNELS]
        report.detail(case, dict(ordered))
        total = sum(times.values()) or 1.0
        top = ", ".join(f"{100 * time / total:.0f} % {name[:40]}" for name, time in ordered[:3])
        report.note(f"{case}: {total / 1e3:.2f} ms in kernels: {top}")
