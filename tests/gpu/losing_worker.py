"""`python -m tests.gpu.losing_worker FILE ...`: a worker that loses its device in the first step
after FILE was made, which it removes. Where there is no GPU it says that it had."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from tests.worker_svc.device import DEVICE, ON_GPU
from worker_svc.__main__ import main
from worker_svc.model_runner import ModelRunner, PendingStep
from worker_svc.step import Step

TRIGGER = Path(sys.argv.pop(1))

if ON_GPU:
    import triton.language as tl

    from worker_svc.kernels.launch import kernel

    @kernel()
    def _stray_kernel(x: tl.tensor) -> None:
        tl.store(x + (1 << 42), 1.0)


def lose_device() -> None:
    if ON_GPU:
        _stray_kernel[(1,)](torch.zeros(1, device=DEVICE))
    else:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


_launch = ModelRunner.launch


def launch(runner: ModelRunner, step: Step) -> PendingStep:
    if TRIGGER.exists():
        TRIGGER.unlink()
        lose_device()
    return _launch(runner, step)


if __name__ == "__main__":
    ModelRunner.launch = launch  # type: ignore[method-assign]
    sys.exit(main())
