"""The setup on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from bench.gpu_check.setup import Setup
from bench.gpu_check.timing import CudaTimer
from worker_svc.platforms.cuda import CudaPlatform


class UncapturedCuda(CudaPlatform):
    """Steps are padded to static buffers as for graphs, and launched kernel by kernel."""

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        return run


def gpu_setup(directory: Path, model: Path, peer: Path | None, seed: int) -> Setup:
    return Setup(
        device=torch.device("cuda", 0),
        platform=CudaPlatform,
        uncaptured=UncapturedCuda,
        timer=CudaTimer(),
        directory=directory,
        model=model,
        peer=peer,
        seed=seed,
    )
