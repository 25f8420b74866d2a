"""A worker's GPU path on CPU tensors, its kernels in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tests.worker_svc.kernels.triton.precision import poisoned_memory
from worker_svc.attention.base import AttentionShape, Backend
from worker_svc.attention.choice import choose_backend
from worker_svc.devices.cpu import CpuPlatform
from worker_svc.kernels.ops import Ops
from worker_svc.kernels.triton import batch_invariance
from worker_svc.kernels.triton import ops as triton_ops
from worker_svc.kernels.triton.advance import advance
from worker_svc.ranks.distributed import Ranks
from worker_svc.settings import WorkerSettings
from worker_svc.step.tensors import StepTensors

NUM_SMS = 2  # splits lone sequences, but into few parts: each is slow here


class InterpretedPlatform(CpuPlatform):
    """Pads steps and runs them on static buffers, as in a CUDA graph; a replay calls the function
    that would have been captured. The rows of tokens that no sequence has are NaN."""

    ops: Ops = triton_ops
    captures = True

    def __init__(self, settings: WorkerSettings) -> None:
        super().__init__(settings)
        self.ops = triton_ops
        batch_invariance.switch(settings.batch_invariant)
        self.captures = not settings.enforce_eager

    def choose_dtype(self, setting: str, checkpoint: torch.dtype) -> torch.dtype:
        return checkpoint if setting == "auto" else getattr(torch, setting)

    def attention_backend(self, settings: WorkerSettings, shape: AttentionShape) -> Backend:
        size = None if settings.block_size == "auto" else settings.block_size
        return choose_backend(settings.attention, shape, size, capability=(9, 0), num_sms=NUM_SMS)

    def prepare(
        self, hidden_states: Callable[..., torch.Tensor], backend: Backend, ranks: Ranks
    ) -> Callable[..., torch.Tensor]:
        return hidden_states

    def capture(self, run: Callable[[], None], *_: object) -> Callable[[], None]:
        replay = poisoned_memory()(run)
        replay()  # as the warm-ups before a capture do
        return replay

    def advance(self, tensors: StepTensors, block_size: int) -> None:
        advance(tensors, block_size)
