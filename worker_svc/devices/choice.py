"""Chooses the kind of device that this process runs on."""

from __future__ import annotations

from importlib import import_module

import torch

from worker_svc.devices.base import Platform
from worker_svc.settings import WorkerSettings


def choose_platform(settings: WorkerSettings) -> Platform:
    """Sets up the device that the settings ask for.

    Raises:
        StartError: the device asked for is not there.
    """
    choose_vector_math()
    # Imports only the one needed: there is no Triton without a GPU, and a GPU needs no numba.
    if settings.device == "cuda" or (settings.device == "auto" and torch.cuda.is_available()):
        from worker_svc.devices.cuda import CudaPlatform

        return CudaPlatform(settings)
    from worker_svc.devices.cpu import CpuPlatform

    return CpuPlatform(settings)


def choose_vector_math() -> None:
    """Has MKL choose its cos, exp and the like for this CPU while one thread asks. Where several
    threads make a process's first call, one may get functions that are wrong by up to 1.5e-4:
    https://github.com/pytorch/pytorch/issues/188792."""
    torch.zeros(1).exp()


def preload(device: str) -> None:
    """Imports most of what `choose_platform` and a first step would, for forks of this process.

    It asks for no device: once CUDA has been asked for any, it does not work in forks.
    """
    if device == "cuda" or (device == "auto" and torch.version.cuda):
        import_module("worker_svc.devices.cuda")
        return
    import_module("worker_svc.devices.cpu")
    target = import_module("numba.core.registry").cpu_target
    target.typing_context.refresh()  # otherwise done for the first function
    target.target_context.refresh()
