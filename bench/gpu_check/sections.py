"""What there is to check, in the order of the table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Section:
    """`module` has `parts(setup)`, `bench.gpu_check.parts.PartPlan`s."""

    name: str
    module: str
    limit_s: float
    measures: bool  # alone on the GPU; the others, which only prove, run side by side
    needs_model: bool = False  # qwen3-0.6b with random weights


# Those that prove run side by side: 110 s and then the others' sum is the most it takes, 8 minutes.
SECTIONS = (
    Section("kernels", "bench.gpu_check.kernels", 110, measures=False),
    Section("attention", "bench.gpu_check.backends", 110, measures=False),
    Section("model", "bench.gpu_check.model", 110, measures=False),
    Section("graphs", "bench.gpu_check.graphs", 110, measures=False),
    Section("tp", "bench.gpu_check.ranks", 110, measures=False),
    Section("decode", "bench.gpu_check.decode_speed", 75, measures=True),
    Section("prompt", "bench.gpu_check.prompt_speed", 50, measures=True),
    Section("step", "bench.gpu_check.step_speed", 55, measures=True, needs_model=True),
    Section("workload", "bench.gpu_check.workload_speed", 190, measures=True, needs_model=True),
)
