"""CPUs: torch, oneDNN and numba."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numba
import psutil
import torch
from numpy.typing import NDArray

from worker_svc.attention.base import AttentionShape, Backend
from worker_svc.attention.cpu_backend import CpuBackend
from worker_svc.devices.base import Platform
from worker_svc.errors import ModelError, StartError
from worker_svc.kernels.cpu import ops as cpu_ops
from worker_svc.kernels.cpu_features import num_cores
from worker_svc.kernels.ops import Ops
from worker_svc.settings import WorkerSettings

DEFAULT_BLOCK_SIZE = 16
# Share of the memory that is free after the warm-up step. Others need it too: other ranks, the page
# cache, the rest of the stack.
CACHE_SHARE = 0.4
# Multiply-adds of a step that one thread computes in some 20 ms.
SMALL_STEP = 256_000_000


@dataclass(frozen=True)
class Arrays:
    """Results that are already there."""

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
        # Copies: the next step overwrites what this one sampled.
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
        """Sets the calling thread's number of threads: as in the settings, or one per core, divided
        among the ranks of the machine's engines. Both libraries keep the number per thread."""
        share = max(num_cores() // (settings.engines_on_host * settings.tp), 1)
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
        size = settings.block_size
        return CpuBackend(shape, DEFAULT_BLOCK_SIZE if size == "auto" else size)

    def start(self, multiply_adds: int) -> CpuStopwatch:
        """Begins a step. A small one is computed on one thread: dozens of short parallel parts of
        which each waits for the last thread take many times as long as soon as the machine is busy
        with anything else, such as the rest of the stack."""
        self._use(1 if multiply_adds < SMALL_STEP else self._max_threads)
        return CpuStopwatch()

    def _use(self, threads: int) -> None:
        torch.set_num_threads(threads)
        numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))

    def capture(
        self,
        run: Callable[[], None],
        pool: Any = None,
        superseded: Callable[[], bool] = lambda: False,
    ) -> Callable[[], None]:
        return run

    def measure_peak_bytes(self, run: Callable[[], object]) -> int:
        """Calls `run` and measures nothing: activations are small beside what `CACHE_SHARE`
        leaves."""
        run()
        return 0

    def cache_bytes(self, settings: WorkerSettings, activations: int) -> int:
        share = settings.memory_utilization
        free = psutil.virtual_memory().available
        # All ranks share one memory.
        parts = settings.engines_on_host * settings.tp
        return int(free * (CACHE_SHARE if share == "auto" else share)) // parts

    def memory_bytes(self) -> int:
        return int(psutil.virtual_memory().total)

    def graph_bytes(self) -> int:
        return 0
