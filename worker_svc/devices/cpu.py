"""CPUs: the kernels in C++, torch and oneDNN."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import psutil
import structlog
import torch
from numpy.typing import NDArray

from worker_svc.attention.base import AttentionShape, Backend
from worker_svc.attention.cpu_backend import CpuBackend
from worker_svc.devices.base import Platform
from worker_svc.errors import ModelError, StartError
from worker_svc.kernels.cpu import ops as cpu_ops
from worker_svc.kernels.cpu.library import library, set_threads
from worker_svc.kernels.cpu.traced_model import TracedModel
from worker_svc.kernels.cpu_features import num_cores
from worker_svc.kernels.ops import Ops
from worker_svc.ranks.distributed import Ranks
from worker_svc.settings import WorkerSettings

log = structlog.get_logger(__name__)

DEFAULT_BLOCK_SIZE = 16
# Share of the memory that is free after the warm-up step. The page cache and the other processes
# of the stack need memory too.
CACHE_SHARE = 0.4
# Multiply-adds of a step that one thread computes in some 20 ms.
SMALL_STEP = 256_000_000


@dataclass(frozen=True)
class Arrays:
    """Results that are already on the host."""

    arrays: list[NDArray[Any]]
    seconds: float

    def ready(self) -> bool:
        return True

    def wait(self) -> tuple[list[NDArray[Any]], float]:
        return self.arrays, self.seconds


class CpuStopwatch:
    def __init__(self) -> None:
        self._started = time.perf_counter()

    def fetch(self, tensors: Sequence[torch.Tensor]) -> Arrays:
        # Copies, because the next step overwrites the tokens that this step sampled.
        arrays = [tensor.numpy().copy() for tensor in tensors]
        return Arrays(arrays, time.perf_counter() - self._started)


class CpuPlatform(Platform):
    device = torch.device("cpu")
    ops: Ops = cpu_ops
    captures = False
    compiles = False
    num_batched_tokens = 2048
    pinned = False

    def __init__(self, settings: WorkerSettings) -> None:
        """Sets how many threads torch and the kernels use for calls from the current thread.

        The number is the setting `threads`. For auto it is the number of cores divided by the
        number of ranks of all engines on the machine. Both keep the number per thread.
        """
        if settings.batch_invariant:
            self.ops = cast(Ops, SimpleNamespace(**vars(cpu_ops) | {"pack": cpu_ops.pack_panels}))
            log.info("tokens of a CPU do not depend on the batch", setting="batch_invariant")
        share = max(num_cores() // settings.num_sharing, 1)
        threads = share if settings.threads == "auto" else settings.threads
        self._max_threads = threads
        self._use(threads)

    def choose_dtype(self, setting: str, checkpoint: torch.dtype) -> torch.dtype:
        dtype = checkpoint if setting == "auto" else getattr(torch, setting)
        if setting == "auto" and dtype == torch.float16:
            dtype = torch.bfloat16
        if dtype not in (torch.float32, torch.bfloat16):
            name = str(dtype).removeprefix("torch.")
            raise ModelError(f"dtype: {name} is not served on cpu; use float32 or bfloat16")
        return dtype

    def attention_backend(self, settings: WorkerSettings, shape: AttentionShape) -> Backend:
        if settings.attention not in ("auto", "torch"):
            raise StartError(f"attention: {settings.attention} runs on a GPU; on a CPU use torch")
        library()  # if it cannot be compiled, it is better to know before the weights are read
        size = settings.block_size
        return CpuBackend(shape, DEFAULT_BLOCK_SIZE if size == "auto" else size)

    def prepare(
        self, hidden_states: Callable[..., torch.Tensor], backend: Backend, ranks: Ranks
    ) -> Callable[..., torch.Tensor]:
        assert isinstance(backend, CpuBackend)
        return TracedModel(hidden_states, ranks.groups, backend.layout, backend.cache_of)

    def start(self, multiply_adds: int) -> CpuStopwatch:
        """Begins a step, which runs on one thread if it is small.

        A step has hundreds of short phases, and each phase waits for its last thread. On a machine
        that is busy with other processes, a small step takes many times as long.
        """
        self._use(1 if multiply_adds < SMALL_STEP else self._max_threads)
        return CpuStopwatch()

    def _use(self, threads: int) -> None:
        torch.set_num_threads(threads)
        set_threads(min(threads, len(os.sched_getaffinity(0))))

    def measure_peak_bytes(self, run: Callable[[], object]) -> int:
        """Calls `run` without measuring anything. Activations are small compared with the memory
        that `CACHE_SHARE` leaves."""
        run()
        return 0

    def cache_bytes(self, settings: WorkerSettings, activations: int) -> int:
        share = settings.memory_utilization
        free = psutil.virtual_memory().available
        # All ranks share one memory.
        return int(free * (CACHE_SHARE if share == "auto" else share)) // settings.num_sharing

    def memory_bytes(self) -> int:
        return int(psutil.virtual_memory().total)
