"""Measures decode attention with tilings and splits other than the defaults, which helps to choose
the tables in the kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from bench.gpu.attention_speed import describe, make_load
from bench.gpu.records import Report
from bench.gpu.setup import Setup
from bench.gpu.steps import snapshot
from worker_svc.errors import is_device_lost
from worker_svc.kernels.triton.paged_attention import Tiling

DEFAULT = "the kernel's own"
DECODE_TILINGS = (
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


def attempt(rate: Callable[[], float]) -> float | str:
    """Returns the rate, or the reason why the kernel does not run: not every tiling fits a GPU."""
    try:
        return rate()
    except Exception as error:
        if is_device_lost(error):
            raise
        return str(error)


def compare(report: Report, case: str, rates: Mapping[str, float | str], chosen: str) -> None:
    """Notes the best rate and the rate of the default."""
    report.detail(case, dict(rates))
    measured = {name: rate for name, rate in rates.items() if isinstance(rate, float)}
    best = max(measured, key=lambda name: measured[name])
    note = f"{case}: best {best} with {measured[best]:,.4g}"
    if chosen in measured and chosen != best:
        note += f", {chosen} has {measured[chosen]:,.4g}"
    report.note(note)


def measure_decode_tilings(setup: Setup, report: Report) -> None:
    """Measures at the workload's lengths and, for the first heads, at equal lengths."""
    sizes = setup.sizes
    cases = [(*each, snapshot(sizes.workload)) for each in sizes.heads]
    cases.append((*sizes.heads[0], [sizes.contexts[0]] * max(sizes.batches)))
    for label, heads, contexts in cases:
        load = make_load(setup, "triton", heads, contexts)
        splits = load.metadata.splits
        tilings: dict[str, Tiling | None] = {DEFAULT: None}
        for each in DECODE_TILINGS[: sizes.swept]:
            name = f"{each.tile} x {each.num_warps} warps x {each.num_stages} stages"
            tilings[name] = each
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
