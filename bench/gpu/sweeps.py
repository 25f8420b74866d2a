"""Compares the rates with several constants, which helps to choose the tables in the kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from bench.gpu.records import Report
from worker_svc.errors import is_device_lost
from worker_svc.kernels.triton.paged_attention import Tiling

DEFAULT = "the kernel's own"


def tiling_name(tiling: Tiling) -> str:
    return f"{tiling.tile} x {tiling.num_warps} warps x {tiling.num_stages} stages"


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
