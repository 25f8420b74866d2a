"""Chooses the device on which this process runs."""

from __future__ import annotations

import shutil
from contextlib import suppress
from importlib import import_module

import structlog
import torch

from worker_svc.devices.base import Platform
from worker_svc.settings import WorkerSettings

log = structlog.get_logger(__name__)


def choose_platform(settings: WorkerSettings) -> Platform:
    """Sets up the device that the settings ask for.

    Raises:
        StartError: the device that the settings ask for does not exist.
    """
    choose_vector_math()
    # Imports one module only: there is no Triton without a GPU.
    if settings.device == "cuda" or (settings.device == "auto" and torch.cuda.is_available()):
        from worker_svc.devices.cuda import CudaPlatform

        return CudaPlatform(settings)
    from worker_svc.devices.cpu import CpuPlatform

    if settings.device == "auto" and shutil.which("nvidia-smi"):
        log.warning("torch finds no GPU; running on the CPU", torch=torch.__version__)
    return CpuPlatform(settings)


def choose_vector_math() -> None:
    """Makes MKL choose its functions for this CPU (cos, exp, ...) while only one thread calls it.

    If several threads make a process's first call, one of them may get functions that are wrong by
    up to 1.5e-4 (https://github.com/pytorch/pytorch/issues/188792).
    """
    torch.zeros(1).exp()


def preload(device: str) -> None:
    """Imports most modules of `choose_platform` and a first step before this process is forked, and
    loads the CPU's kernels or a GPU's library of attention.

    It does not initialize CUDA, because CUDA would then not work in the forks.
    """
    if device == "cuda" or (device == "auto" and torch.version.cuda):
        import_module("worker_svc.devices.cuda")
        import_module("worker_svc.attention.fa3").load()
        with suppress(ImportError):  # `CudaPlatform.memory` tells the user
            import_module("worker_svc.devices.cuda_memory")
        return
    import_module("worker_svc.devices.cpu")
    import_module("worker_svc.kernels.cpu.library").preload()
