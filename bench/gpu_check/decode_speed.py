"""Decode attention: bytes of keys and values per second, against a copy on the same device."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from bench.gpu_check.inputs import on_device
from bench.gpu_check.parts import PartPlan, is_lost
from bench.gpu_check.records import Report
from bench.gpu_check.setup import BACKENDS, Heads, Setup
from bench.gpu_check.steps import uniform_step
from bench.gpu_check.timing import copy_bandwidth
from worker_svc.attention.paged import PagedBackend
from worker_svc.kernels.decode_attention import decode_attention, decode_workspace
from worker_svc.kernels.paged_attention import Tiling
from worker_svc.step_tensors import StepTensors

TARGET = 0.8  # of the copy, at the largest batch
MOST_LAYERS = 64
TILINGS = (
    Tiling(32, 4, 3),
    Tiling(32, 4, 5),
    Tiling(64, 4, 2),
    Tiling(64, 4, 3),
    Tiling(64, 4, 4),
    Tiling(64, 8, 3),
    Tiling(128, 4, 2),
    Tiling(128, 4, 3),
    Tiling(128, 8, 3),
)
DEFAULT = "the kernel's own"
SPLITS = (1, 2, 4, 8, 16, 32, 64)


def parts(setup: Setup) -> list[PartPlan[Setup]]:
    return [
        PartPlan("copy", copy_rate),
        *(PartPlan(name, partial(measure_backend, name=name)) for name in BACKENDS),
        PartPlan("tilings", sweep_tilings),
        PartPlan("block sizes", sweep_block_sizes),
        PartPlan("splits", sweep_splits),
    ]


def copy_rate(setup: Setup, report: Report) -> float:
    """GB/s, measured once per section."""
    rate = report.value("copy")
    if rate is None:
        rate = copy_bandwidth(setup.timer, setup.sizes.copy_bytes, setup.device) / 1e9
        report.figure("copy", rate, "GB/s")
    return rate


@dataclass(frozen=True)
class Load:
    """Decodes of sequences of one length, in as many layers as exceed the L2 cache."""

    setup: Setup
    backend: PagedBackend[Any]
    rows: int
    context: int
    caches: list[torch.Tensor]
    q: torch.Tensor
    tensors: StepTensors
    metadata: Any

    def rate(self, attend: Callable[[torch.Tensor], object]) -> float:
        """GB/s of keys and values, where `attend` takes a layer's cache."""
        seconds = self.setup.timer.in_graph([partial(attend, cache) for cache in self.caches])
        shape = self.backend.shape
        size = self.rows * self.context * shape.cache_bytes_per_token / shape.num_layers
        return size / seconds / 1e9

    def attend(self, cache: torch.Tensor) -> torch.Tensor:
        return self.backend.attend(self.q, cache, self.metadata)

    def kernel(self, splits: int, tiling: Tiling | None = None) -> Callable[[torch.Tensor], object]:
        """Ours, by itself."""
        shape, tensors = self.backend.shape, self.tensors
        size = self.rows, shape.num_heads, shape.head_dim
        workspace = decode_workspace(*size, splits, self.q.device)
        out = torch.empty_like(self.q)

        def attend(cache: torch.Tensor) -> None:
            decode_attention(
                self.q,
                cache,
                tensors.attention,
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
    setup: Setup, name: str, heads: Heads, rows: int, context: int, block_size: int | str = "auto"
) -> Load:
    size = rows * context * heads.kv_heads * heads.head_dim * 2 * setup.dtype.itemsize
    layers = min(max(math.ceil(setup.sizes.rotated_bytes / size), 2), MOST_LAYERS)
    backend = setup.backend(name, heads, setup.dtype, layers=layers, block_size=block_size)
    step = uniform_step(rows, 1, context, backend.block_size, vocab=2)
    tensors = on_device(step, backend.column(step), setup.device)
    generator = setup.generator(name)
    caches = backend.allocate(rows * math.ceil(context / backend.block_size))
    q = torch.randn(rows, heads.heads, heads.head_dim, device=setup.device, generator=generator)
    return Load(
        setup,
        backend,
        rows,
        context,
        caches=[cache.normal_(generator=generator) for cache in caches],
        q=q.to(setup.dtype),
        tensors=tensors,
        metadata=backend.plan(step, tensors, context),
    )


def measure_backend(setup: Setup, report: Report, name: str) -> None:
    sizes = setup.sizes
    for label, heads in sizes.speed_heads:
        for context in sizes.speed_contexts:
            for rows in sizes.speed_batches:
                load = make_load(setup, name, heads, rows, context)
                report.figure(
                    f"{label}, batch {rows}, context {context}",
                    load.rate(load.attend),
                    "GB/s",
                    copy_rate(setup, report),
                    TARGET if rows == max(sizes.speed_batches) else None,
                )


def sweep_tilings(setup: Setup, report: Report) -> None:
    """At the largest batch, where decoding takes longest; of the first heads at the middle one too:
    every tiling is compiled for each."""
    sizes = setup.sizes
    context = sizes.speed_contexts[0]
    for label, heads in sizes.speed_heads:
        batches = sorted(sizes.speed_batches)
        for rows in batches[-2:] if heads == sizes.speed_heads[0][1] else batches[-1:]:
            load = make_load(setup, "triton", heads, rows, context)
            splits = load.metadata.splits
            rates = {DEFAULT: _tried(load, splits, None)} | {
                tiling_name(tiling): _tried(load, splits, tiling) for tiling in TILINGS
            }
            compare(report, f"{label}, batch {rows}, context {context}", rates, DEFAULT)


def sweep_block_sizes(setup: Setup, report: Report) -> None:
    sizes = setup.sizes
    label, heads = sizes.speed_heads[0]
    rows, context = max(sizes.speed_batches), sizes.speed_contexts[0]
    rates: dict[str, float | str] = {}
    for block_size in sizes.block_sizes:
        load = make_load(setup, "triton", heads, rows, context, block_size)
        rates[str(block_size)] = load.rate(load.attend)
    compare(report, f"{label}, batch {rows}, context {context}", rates)


def sweep_splits(setup: Setup, report: Report) -> None:
    sizes = setup.sizes
    label, heads = sizes.speed_heads[0]
    for context in sizes.speed_contexts:
        for rows in sizes.speed_batches:
            load = make_load(setup, "triton", heads, rows, context)
            chosen = load.metadata.splits
            # More programs than this only combine more.
            tried = sorted({chosen, *(n for n in SPLITS if n * rows <= 32 * max(32, rows))})
            rates = {str(splits): _tried(load, splits, None) for splits in tried}
            compare(report, f"{label}, batch {rows}, context {context}", rates, str(chosen))


def tiling_name(tiling: Tiling) -> str:
    return f"{tiling.tile} x {tiling.num_warps} warps x {tiling.num_stages} stages"


def compare(
    report: Report, case: str, rates: dict[str, float | str], chosen: str | None = None
) -> None:
    """Notes the best, beside what is chosen by default."""
    report.detail(case, rates)
    measured = {name: rate for name, rate in rates.items() if isinstance(rate, float)}
    best = max(measured, key=lambda name: measured[name])
    note = f"{case}: best {best} with {measured[best]:,.4g}"
    if chosen in measured and chosen != best:
        note += f", {chosen} has {measured[chosen]:,.4g}"
    report.note(note)


def _tried(load: Load, splits: int, tiling: Tiling | None) -> float | str:
    """GB/s, or why it does not run: not every tiling fits every GPU."""
    try:
        return load.rate(load.kernel(splits, tiling))
    except Exception as error:
        if is_lost(error):
            raise
        return str(error)
