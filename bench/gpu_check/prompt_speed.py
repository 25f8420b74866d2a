"""Prompt attention: floating-point operations per second, against a matrix product."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from bench.gpu_check.decode_speed import DEFAULT, compare, tiling_name
from bench.gpu_check.inputs import on_device
from bench.gpu_check.parts import PartPlan, is_lost
from bench.gpu_check.records import Report
from bench.gpu_check.setup import BACKENDS, Heads, Setup
from bench.gpu_check.steps import uniform_step
from worker_svc.kernels.paged_attention import Tiling
from worker_svc.kernels.prompt_attention import prompt_attention

TILINGS = (
    Tiling(64, 4, 2),
    Tiling(64, 4, 3),
    Tiling(64, 8, 2),
    Tiling(64, 8, 3),
    Tiling(128, 4, 2),
    Tiling(128, 8, 2),
    Tiling(128, 8, 3),
)


def parts(setup: Setup) -> list[PartPlan[Setup]]:
    return [
        PartPlan("matrix product", matmul_rate),
        *(PartPlan(name, partial(measure_backend, name=name)) for name in BACKENDS),
        PartPlan("tilings", sweep_tilings),
    ]


def matmul_rate(setup: Setup, report: Report) -> float:
    """TFLOP/s of a square product, measured once per section."""
    rate = report.value("matrix product")
    if rate is None:
        size = setup.sizes.matmul
        generator = setup.generator("matmul")
        a, b = (
            torch.randn(size, size, device=setup.device, generator=generator).to(setup.dtype)
            for _ in range(2)
        )
        out = torch.empty_like(a)
        seconds = setup.timer.in_graph([lambda: torch.mm(a, b.T, out=out)])
        rate = 2 * size**3 / seconds / 1e12
        report.figure("matrix product", rate, "TFLOP/s")
    return rate


def attention_flops(heads: Heads, queries: int, context: int) -> float:
    """Of one sequence's last `queries` positions, each of which sees those up to itself."""
    seen = queries * (context - queries) + queries * (queries + 1) / 2
    return 4 * heads.heads * heads.head_dim * seen


def measure_backend(setup: Setup, report: Report, name: str) -> None:
    for label, heads in setup.sizes.speed_heads:
        for rows, queries, context in setup.sizes.prompts:
            prompts = _Prompts(setup, name, heads, rows, queries, context)
            report.figure(
                f"{label}, {prompts.case}",
                prompts.rate(None),
                "TFLOP/s",
                matmul_rate(setup, report),
            )


def sweep_tilings(setup: Setup, report: Report) -> None:
    label, heads = setup.sizes.speed_heads[0]
    for sizes in (setup.sizes.prompts[0], setup.sizes.prompts[-1]):
        prompts = _Prompts(setup, "triton", heads, *sizes)
        default: dict[str, float | str] = {DEFAULT: prompts.rate(None)}
        rates = default | {tiling_name(tiling): _tried(prompts, tiling) for tiling in TILINGS}
        compare(report, f"{label}, {prompts.case}", rates, DEFAULT)


class _Prompts:
    """Prompts of one length."""

    def __init__(
        self, setup: Setup, name: str, heads: Heads, rows: int, queries: int, context: int
    ) -> None:
        self.case = f"{rows} x {queries} of {context}"
        self._timer = setup.timer
        self._flops = rows * attention_flops(heads, queries, context)
        self._backend = backend = setup.backend(name, heads, setup.dtype)
        generator = setup.generator(name)
        step = uniform_step(rows, queries, context, backend.block_size, vocab=2)
        self._cache = backend.allocate(int(step.block_table.max()) + 1)[0]
        self._cache.normal_(generator=generator)
        size = (step.num_tokens, heads.heads, heads.head_dim)
        q = torch.randn(size, device=setup.device, generator=generator)
        self._q = q.to(setup.dtype)
        self._tensors = on_device(step, backend.column(step), setup.device)
        self._metadata: Any = backend.plan(step, self._tensors, context)

    def rate(self, tiling: Tiling | None) -> float:
        """TFLOP/s, with a tiling of our kernel by itself."""
        if tiling is None:
            attend = partial(self._backend.attend, self._q, self._cache, self._metadata)
            return self._flops / self._timer.in_graph([attend]) / 1e12
        tensors = self._tensors
        out = torch.empty_like(self._q)
        kernel = partial(
            prompt_attention,
            self._q,
            self._cache,
            self._metadata.tiles,
            tensors.query_starts,
            tensors.context_lens,
            tensors.block_table,
            tensors.table_offsets,
            self._backend.shape.scale,
            out,
            tiling,
        )
        return self._flops / self._timer.in_graph([kernel]) / 1e12


def _tried(prompts: _Prompts, tiling: Tiling) -> float | str:
    """Or why it does not run: not every tiling fits every GPU."""
    try:
        return prompts.rate(tiling)
    except Exception as error:
        if is_lost(error):
            raise
        return str(error)
