"""Which kind of device this process runs on."""

from __future__ import annotations

import torch

from shared.config import WorkerSettings
from worker_svc.platforms.base import Platform


def choose_platform(settings: WorkerSettings) -> Platform:
    """
    Raises:
        StartError: the device asked for is not there.
    """
    # Only the one that is needed: there is no Triton without a GPU, and a GPU needs no numba.
    if settings.device == "cuda" or (settings.device == "auto" and torch.cuda.is_available()):
        from worker_svc.platforms.cuda import CudaPlatform

        return CudaPlatform(settings)
    from worker_svc.platforms.cpu import CpuPlatform

    return CpuPlatform(settings)
