"""Measures prompt attention in floating-point operations per second, against a matrix product."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from bench.gpu.ceilings import matmul_rate
from bench.gpu.heads import Heads
from bench.gpu.records import Report
from bench.gpu.setup import BACKENDS, Setup
from bench.gpu.steps import make_step
from worker_svc.kernels.triton.paged_attention import Tiling
from worker_svc.kernels.triton.prompt_attention import prompt_attention
from worker_svc.step.tensors import upload_step


def attention_flops(heads: Heads, queries: int, context: int) -> float:
    """Operations for a sequence's last `queries` positions. Each position sees all positions up to
    itself."""
    seen = queries * (context - queries) + queries * (queries + 1) / 2
    return 4 * heads.heads * heads.head_dim * seen


class Prompts:
    """Prompts of one length."""

    def __init__(
        self, setup: Setup, name: str, heads: Heads, rows: int, queries: int, context: int
    ) -> None:
        self.case = f"{rows} x {queries} of {context}"
        self._timer = setup.timer
        self._flops = rows * attention_flops(heads, queries, context)
        self._backend = backend = setup.backend(name, heads)
        generator = setup.generator(name)
        step = make_step([queries] * rows, [context] * rows, backend.block_size, vocab=2)
        self._cache = backend.allocate(int(step.block_table.max()) + 1)[0]
        self._cache.normal_(generator=generator)
        size = (step.num_tokens, heads.heads, heads.head_dim)
        q = torch.randn(size, device=setup.device, generator=generator)
        self._q = q.to(setup.dtype)
        self._tensors = upload_step(step, backend.plan_column(step), setup.device)
        self._metadata: Any = backend.plan(step, self._tensors, context)

    def rate(self, tiling: Tiling | None = None) -> float:
        """Measures TFLOP/s; with a tiling, measures only this project's kernel."""
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


@pytest.mark.parametrize("name", BACKENDS)
def measure_prompts(setup: Setup, report: Report, name: str) -> None:
    for label, heads in setup.sizes.heads:
        for sizes in setup.sizes.prompts:
            prompts = Prompts(setup, name, heads, *sizes)
            case = f"prompt attention, {name}, {label}, {prompts.case}"
            report.figure(case, prompts.rate(), "TFLOP/s", matmul_rate(setup, report))
