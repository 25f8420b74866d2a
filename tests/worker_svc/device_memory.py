"""A GPU's memory that outlives its process, or on a CPU the host's memory instead."""

from __future__ import annotations

import torch

from tests.worker_svc.device import DEVICE, ON_GPU
from worker_svc.devices.cpu import CpuPlatform
from worker_svc.kept_memory.device import DeviceMemory
from worker_svc.kept_memory.host import HostMemory


class StandIn(HostMemory):
    """Like a GPU's: weights are not protected."""

    name = "stand-in"
    protects = False

    def speed_up(self, memory: torch.Tensor) -> str:
        return ""

    def protect(self, piece: torch.Tensor, descriptor: int) -> None:
        pass


def stand_in(platform: CpuPlatform) -> DeviceMemory:
    """Instead of `CpuPlatform.memory`."""
    return StandIn()


def device_memory() -> DeviceMemory:
    if not ON_GPU:
        return StandIn()
    from worker_svc.devices.cuda_memory import CudaMemory

    return CudaMemory(DEVICE)
