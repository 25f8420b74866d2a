"""The first parts of the smoke run, which measure the GPU and its software without a model."""

from __future__ import annotations

import torch

from bench.gpu.ceilings import bandwidth
from bench.gpu.records import Report
from bench.gpu.setup import Setup


def measure_copy(setup: Setup, report: Report) -> None:
    """Copies 1 GiB without Triton and without code of the worker."""
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
    """Runs a first Triton kernel."""
    bandwidth(setup, report)
