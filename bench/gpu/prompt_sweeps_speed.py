"""Measures prompt attention with tilings other than the default."""

from __future__ import annotations

from functools import partial

from bench.gpu.prompt_speed import Prompts
from bench.gpu.records import Report
from bench.gpu.setup import Setup
from bench.gpu.sweeps import DEFAULT, attempt, compare, tiling_name
from worker_svc.kernels.triton.paged_attention import Tiling

TILINGS = (
    Tiling(64, 4, 2),
    Tiling(64, 4, 3),
    Tiling(64, 8, 2),
    Tiling(64, 8, 3),
    Tiling(128, 4, 2),
    Tiling(128, 8, 2),
    Tiling(128, 8, 3),
)


def measure_tilings(setup: Setup, report: Report) -> None:
    label, heads = setup.sizes.heads[0]
    for sizes in (setup.sizes.prompts[0], setup.sizes.prompts[-1]):
        prompts = Prompts(setup, "triton", heads, *sizes)
        rates: dict[str, float | str] = {DEFAULT: prompts.rate()}
        rates |= {
            tiling_name(t): attempt(partial(prompts.rate, t)) for t in TILINGS[: setup.sizes.swept]
        }
        compare(report, f"tilings, {label}, {prompts.case}", rates, DEFAULT)
