"""Measures decode attention with tilings, splits and block sizes other than the defaults."""

from __future__ import annotations

from functools import partial

from bench.gpu.decode_speed import describe, make_load
from bench.gpu.records import Report
from bench.gpu.setup import Setup
from bench.gpu.steps import snapshot
from bench.gpu.sweeps import DEFAULT, attempt, compare, tiling_name
from worker_svc.kernels.triton.paged_attention import Tiling

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
SPLITS = (1, 2, 4, 8, 16, 32)


def measure_tilings(setup: Setup, report: Report) -> None:
    """Measures at the workload's lengths and, for the first heads, at equal lengths."""
    sizes = setup.sizes
    cases = [(*each, snapshot(sizes.workload)) for each in sizes.heads]
    cases.append((*sizes.heads[0], [sizes.contexts[0]] * max(sizes.batches)))
    for label, heads, contexts in cases:
        load = make_load(setup, "triton", heads, contexts)
        splits = load.metadata.splits
        tilings = {DEFAULT: None, **{tiling_name(each): each for each in TILINGS[: sizes.swept]}}
        rates = {
            name: attempt(partial(load.rate, load.kernel(splits, tiling)))
            for name, tiling in tilings.items()
        }
        compare(report, f"tilings, {label}, {describe(contexts)}", rates, DEFAULT)


def measure_splits(setup: Setup, report: Report) -> None:
    sizes = setup.sizes
    label, heads = sizes.heads[0]
    cases = [[context] * rows for context in sizes.contexts for rows in sizes.batches]
    for contexts in [*cases, snapshot(sizes.workload)]:
        load = make_load(setup, "triton", heads, contexts)
        rows, chosen = len(contexts), load.metadata.splits
        # More programs than this would only take more time to combine.
        counts = sorted(
            {chosen, *(n for n in SPLITS[: sizes.swept] if n * rows <= 32 * max(32, rows))}
        )
        rates = {str(n): attempt(partial(load.rate, load.kernel(n))) for n in counts}
        compare(report, f"splits, {label}, {describe(contexts)}", rates, str(chosen))


def measure_block_sizes(setup: Setup, report: Report) -> None:
    label, heads = setup.sizes.heads[0]
    contexts = snapshot(setup.sizes.workload)
    rates: dict[str, float | str] = {}
    for block_size in setup.sizes.block_sizes:
        load = make_load(setup, "triton", heads, contexts, block_size)
        rates[str(block_size)] = load.rate(load.attend)
    chosen = make_load(setup, "triton", heads, [1]).backend.block_size
    compare(report, f"block sizes, {label}, {describe(contexts)}", rates, str(chosen))
