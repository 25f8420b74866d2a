"""`python -m tests.gpu.faulty_worker FAULT FILE ...` runs a worker with a fault once FILE exists.

none      nothing
lose      the next step loses the device, and FILE is removed
capture   steps cannot be captured in CUDA graphs

Without a GPU, it raises the errors that one would cause, and its memory is kept in a stand-in for a
GPU's.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from tests.worker_svc.device import DEVICE, ON_GPU
from tests.worker_svc.device_memory import stand_in
from worker_svc.__main__ import main
from worker_svc.devices.cpu import CpuPlatform
from worker_svc.errors import CaptureError
from worker_svc.model_runner import ModelRunner
from worker_svc.step_result import PendingStep

if ON_GPU:
    import triton.language as tl

    from worker_svc.kernels.triton.launch import kernel

    @kernel()
    def _stray_kernel(x: tl.tensor) -> None:
        tl.store(x + (1 << 42), 1.0)


def lose_device() -> None:
    if ON_GPU:
        _stray_kernel[(1,)](torch.zeros(1, device=DEVICE))
    else:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


def plant(fault: str, file: Path) -> None:
    launch, run, configure = ModelRunner.launch, ModelRunner._run, ModelRunner.configure

    def launch_and_lose(runner: ModelRunner, *arguments: Any) -> PendingStep:
        if file.exists():
            file.unlink()
            lose_device()
        return launch(runner, *arguments)

    def run_and_wait(runner: ModelRunner, *arguments: Any) -> torch.Tensor:
        if file.exists() and ON_GPU and torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize()  # not allowed during a capture
        return run(runner, *arguments)

    def configure_without_gpu(runner: ModelRunner, *arguments: Any) -> None:
        if file.exists() and not ON_GPU:
            raise CaptureError(
                "CUDA graphs: a step of 8 decodes and 0 tokens of prompts cannot be captured"
            )
        configure(runner, *arguments)

    if not ON_GPU:
        platform: Any = CpuPlatform
        platform.memory = stand_in
    patched: Any = ModelRunner
    if fault == "lose":
        patched.launch = launch_and_lose
    elif fault == "capture":
        patched._run, patched.configure = run_and_wait, configure_without_gpu


if __name__ == "__main__":
    plant(sys.argv.pop(1), Path(sys.argv.pop(1)))
    sys.exit(main())
