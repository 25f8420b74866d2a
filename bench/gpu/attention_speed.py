"""Measures decode attention in bytes of keys and values per second, against the bandwidth.

Prompt attention is measured in floating-point operations per second, against a matrix product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import pytest
import torch

from bench.gpu.ceilings_speed import attention_flops, bandwidth, matmul_rate
from bench.gpu.records import Report
from bench.gpu.setup import BACKENDS, Setup
from bench.gpu.steps import Heads, blocks_needed, make_step, snapshot
from worker_svc.attention.paged import PagedBackend
from worker_svc.kernels.triton.decode_attention import decode_attention, decode_workspace
from worker_svc.kernels.triton.paged_attention import Tiling
from worker_svc.step.tensors import StepTensors, upload_step

TARGET = 0.85  # share of the bandwidth, at the largest batch


@dataclass(frozen=True)
class Load:
    """Decodes in so many layers that the L2 cache cannot hold their keys and values."""

    setup: Setup
    backend: PagedBackend[Any]
    contexts: Sequence[int]
    caches: list[torch.Tensor]
    q: torch.Tensor
    tensors: StepTensors
    metadata: Any

    def rate(self, attend: Callable[[torch.Tensor], object]) -> float:
        """Measures GB/s of keys and values; `attend` takes a layer's cache."""
        seconds = self.setup.timer.in_graph([partial(attend, cache) for cache in self.caches])
        shape = self.backend.shape
        size = sum(self.contexts) * shape.cache_bytes_per_token
        return size / seconds / 1e9

    def attend(self, cache: torch.Tensor) -> torch.Tensor:
        return self.backend.attend(self.q, cache, self.metadata)

    def kernel(self, splits: int, tiling: Tiling | None = None) -> Callable[[torch.Tensor], object]:
        """Returns an `attend` that runs only this project's kernel."""
        shape, tensors = self.backend.shape, self.tensors
        size = len(self.contexts), shape.num_heads, shape.head_dim
        workspace = decode_workspace(*size, splits, self.q.device)
        out = torch.empty_like(self.q)

        def attend(cache: torch.Tensor) -> None:
            decode_attention(
                self.q,
                cache,
                tensors.plan_column,
                tensors.query_starts,
                tensors.context_lens,
                tensors.block_table,
                tensors.table_offsets,
                shape.scale,
                splits,
                workspace,
                out,
                tiling,
            )

        return attend


def make_load(
    setup: Setup,
    name: str,
    heads: Heads,
    contexts: Sequence[int],
    kv_dtype: Literal["auto", "int8", "fp8"] = "auto",
) -> Load:
    rows = len(contexts)
    itemsize = setup.dtype.itemsize if kv_dtype == "auto" else 1
    layers = setup.sizes.layers(sum(contexts) * heads.kv_heads * heads.head_dim * 2 * itemsize)
    backend = setup.backend(name, heads, layers=layers, kv_dtype=kv_dtype)
    step = make_step([1] * rows, contexts, backend.block_size, vocab=2)
    tensors = upload_step(step, backend.plan_column(step), setup.device)
    generator = setup.generator(name)
    caches = backend.allocate(blocks_needed(contexts, backend.block_size))
    q = torch.randn(rows, heads.heads, heads.head_dim, device=setup.device, generator=generator)
    return Load(
        setup,
        backend,
        contexts,
        # The values of codes and scales do not change the time.
        caches=[
            (cache.random_ if cache.dtype.itemsize == 1 else cache.normal_)(generator=generator)
            for cache in caches
        ],
        q=q.to(setup.dtype),
        tensors=tensors,
        metadata=backend.plan(step, tensors, max(contexts)),
    )


def measure_equal_lengths(setup: Setup, report: Report) -> None:
    for label, heads in setup.sizes.heads:
        for context in setup.sizes.contexts:
            for rows in setup.sizes.batches:
                report_rate(setup, report, label, heads, [context] * rows)


def measure_mixed_lengths(setup: Setup, report: Report) -> None:
    """Measures the contexts in the middle of the reference workload."""
    for label, heads in setup.sizes.heads:
        report_rate(setup, report, label, heads, snapshot(setup.sizes.workload))


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def measure_caches_in_8_bits(
    setup: Setup, report: Report, kv_dtype: Literal["int8", "fp8"]
) -> None:
    for label, heads in setup.sizes.heads:
        for rows in setup.sizes.batches:
            contexts = [max(setup.sizes.contexts)] * rows
            report_rate(setup, report, label, heads, contexts, kv_dtype)


def report_rate(
    setup: Setup,
    report: Report,
    label: str,
    heads: Heads,
    contexts: Sequence[int],
    kv_dtype: Literal["auto", "int8", "fp8"] = "auto",
) -> None:
    """Measures a batch of decodes; the largest has a target."""
    load = make_load(setup, "triton", heads, contexts, kv_dtype=kv_dtype)
    kind = "triton" if kv_dtype == "auto" else f"{kv_dtype} cache"
    report.figure(
        f"decode attention, {kind}, {label}, {describe(contexts)}",
        load.rate(load.attend),
        "GB/s",
        bandwidth(setup, report),
        TARGET if len(contexts) >= max(setup.sizes.batches) else None,
    )


def describe(contexts: Sequence[int]) -> str:
    lengths = f"x {contexts[0]}" if len(set(contexts)) == 1 else "mixed"
    return f"{len(contexts)} {lengths}"


@pytest.mark.parametrize("name", BACKENDS)
def measure_prompts(setup: Setup, report: Report, name: str) -> None:
    """Measures prompts of one length."""
    for label, heads in setup.sizes.heads:
        for rows, queries, context in setup.sizes.prompts:
            backend, generator = setup.backend(name, heads), setup.generator(name)
            step = make_step([queries] * rows, [context] * rows, backend.block_size, vocab=2)
            cache = backend.allocate(int(step.block_table.max()) + 1)[0]
            cache.normal_(generator=generator)
            size = (step.num_tokens, heads.heads, heads.head_dim)
            q = torch.randn(size, device=setup.device, generator=generator).to(setup.dtype)
            tensors = upload_step(step, backend.plan_column(step), setup.device)
            metadata: Any = backend.plan(step, tensors, context)
            seconds = setup.timer.in_graph([partial(backend.attend, q, cache, metadata)])
            report.figure(
                f"prompt attention, {name}, {label}, {rows} x {queries} of {context}",
                rows * attention_flops(heads, queries, context) / seconds / 1e12,
                "TFLOP/s",
                matmul_rate(setup, report),
            )
