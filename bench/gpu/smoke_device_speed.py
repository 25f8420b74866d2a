"""The smoke's first parts: whatever else fails, these say what the GPU and its software can do."""

from __future__ import annotations

import torch

from bench.gpu.ceilings import bandwidth
from bench.gpu.records import Report
from bench.gpu.setup import Setup


def measure_copy(setup: Setup, report: Report) -> None:
    """Copies 1 GiB without Triton or any code of the worker."""
    report.note(f"torch {torch.__version__}, CUDA {torch.version.cuda}, {setup.device}")
    source = torch.ones(setup.sizes.copied_bytes // 4, device=setup.device)
    target = torch.empty_like(source)
    seconds = setup.timer.eager(lambda: target.copy_(source))
    assert torch.equal(source, target)
    report.figure("copy", 2e-9 * setup.sizes.copied_bytes / seconds, "GB/s")


def measure_imports() -> None:
    import worker_svc.devices.cuda  # noqa: F401

    assert callable(torch.nn.functional.scaled_mm)


def measure_bandwidth(setup: Setup, report: Report) -> None:
    """Runs a first kernel of Triton's."""
    bandwidth(setup, report)
