"""NVIDIA GPUs: Triton, FlashAttention, cuBLAS and CUDA graphs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import structlog
import torch
from numpy.typing import NDArray

from worker_svc.attention.base import AttentionShape, Backend
from worker_svc.attention.choice import choose_backend
from worker_svc.devices.base import Platform
from worker_svc.devices.pinned_copies import PinnedCopies
from worker_svc.errors import ModelError, StartError, SupersededError
from worker_svc.kept_memory.device import DeviceMemory
from worker_svc.kernels.ops import Ops
from worker_svc.kernels.triton import batch_invariance
from worker_svc.kernels.triton import ops as triton_ops
from worker_svc.kernels.triton.advance import advance
from worker_svc.kernels.triton.launch import Launcher
from worker_svc.settings import WorkerSettings
from worker_svc.step.tensors import StepTensors

log = structlog.get_logger(__name__)

OLDEST = (8, 0)  # Ampere: the first with bfloat16
# Share of all memory. Graphs, cuBLAS and NCCL use the rest; they allocate after the measurement.
MEMORY_SHARE = 0.9
CAPTURE_WARM_UPS = 2  # cuBLAS and Triton allocate and compile in the first runs
_POLL_S = 0.001


@dataclass(frozen=True)
class ArraysOnTheWay:
    device: torch.device
    tensors: list[torch.Tensor]  # pinned, on the host
    started: torch.cuda.Event
    done: torch.cuda.Event
    copied: torch.cuda.Event

    def ready(self) -> bool:
        return bool(self.copied.query())

    def wait(self) -> tuple[list[NDArray[Any]], float]:
        # On a thread that has chosen no GPU, CUDA would open another context on GPU 0.
        torch.cuda.set_device(self.device)
        self.copied.synchronize()  # lets other threads of Python run
        arrays = [tensor.numpy() for tensor in self.tensors]
        return arrays, self.started.elapsed_time(self.done) / 1000


class CudaStopwatch:
    """Runs a whole step on one stream, the copies to the host included.

    Copying a few hundred bytes takes less time than handing them over to a second stream, for
    which the next step would have to wait.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._started = torch.cuda.Event(enable_timing=True)
        self._started.record()

    def fetch(self, tensors: Sequence[torch.Tensor]) -> ArraysOnTheWay:
        # A thread that waits for `copied` sleeps. By default it would poll for the whole step.
        done, copied = torch.cuda.Event(enable_timing=True), torch.cuda.Event(blocking=True)
        done.record()
        host = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors]
        for there, here in zip(tensors, host, strict=True):
            here.copy_(there, non_blocking=True)
        copied.record()
        return ArraysOnTheWay(self._device, host, self._started, done, copied)


class CudaPlatform(Platform):
    """The GPU of this rank. The ranks of all engines of a machine take its GPUs in order."""

    ops: Ops = triton_ops
    compiles = True
    # A step of prompts is launched kernel by kernel. In that time the GPU computes a few thousand
    # tokens of a small model, so a smaller step would leave it idle.
    num_batched_tokens = 8192
    pinned = True

    def __init__(self, settings: WorkerSettings) -> None:
        """Takes this rank's GPU.

        Raises:
            StartError: there is no GPU for this rank, or it is too old.
        """
        if not torch.cuda.is_available():
            raise StartError("device: cuda, but torch finds no CUDA device")
        batch_invariance.switch(settings.batch_invariant)
        self.device = torch.device("cuda", settings.place % torch.cuda.device_count())
        torch.cuda.set_device(self.device)
        self.captures = not settings.enforce_eager
        if not self.captures:
            log.warning(
                "serving without CUDA graphs, several times slower", setting="enforce_eager"
            )
        # One stream for all graphs: cuBLAS keeps 32 MiB of workspace per stream and never frees it.
        self._capture_stream = torch.cuda.Stream(self.device)
        self._copy_stream = torch.cuda.Stream(self.device)
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._capability = torch.cuda.get_device_capability(self.device)
        if self._capability < OLDEST:
            raise StartError(
                f"device: {torch.cuda.get_device_name(self.device)} has compute capability "
                f"{'.'.join(map(str, self._capability))}; at least 8.0 is needed"
            )

    def choose_dtype(self, setting: str, checkpoint: torch.dtype) -> torch.dtype:
        if setting == "auto":  # float32 weights are served at half size, as other servers do
            return torch.bfloat16 if checkpoint == torch.float32 else checkpoint
        dtype: torch.dtype = getattr(torch, setting)
        if dtype not in (torch.bfloat16, torch.float16):
            raise ModelError(f"dtype: {setting} is not served on cuda; use bfloat16 or float16")
        return dtype

    def attention_backend(self, settings: WorkerSettings, shape: AttentionShape) -> Backend:
        name = settings.attention
        if name == "torch":
            raise StartError("attention: torch runs on a CPU; on a GPU use triton, or auto")
        if settings.batch_invariant:
            if name not in ("auto", "triton"):
                raise StartError(f"attention: {name} is not batch_invariant; use triton, or auto")
            name = "triton"
        properties = torch.cuda.get_device_properties(self.device)
        return choose_backend(
            name,
            shape,
            None if settings.block_size == "auto" else settings.block_size,
            self._capability,
            properties.multi_processor_count,
        )

    def memory(self) -> DeviceMemory | None:
        try:
            from worker_svc.devices.cuda_memory import CudaMemory

            return CudaMemory(self.device)
        except (ImportError, OSError, RuntimeError) as error:
            log.warning("weights and cache do not outlive this process", reason=str(error))
            return None

    def weight_copies(self) -> PinnedCopies:
        return PinnedCopies()

    @contextmanager
    def beside_steps(self) -> Iterator[None]:
        torch.cuda.set_device(self.device)  # in any thread: GPU 0 would get another context
        with torch.cuda.stream(self._copy_stream):
            yield
        self._copy_stream.synchronize()

    def start(self, multiply_adds: int) -> CudaStopwatch:
        return CudaStopwatch(self.device)

    def graph_pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def capture(
        self, run: Callable[[], None], pool: Any, superseded: Callable[[], bool]
    ) -> Callable[[], None]:
        current, side = torch.cuda.current_stream(), self._capture_stream
        side.wait_stream(current)
        warm = torch.cuda.Event()
        with torch.cuda.stream(side):
            for _ in range(CAPTURE_WARM_UPS):
                run()
            warm.record()
        # A capture begins by waiting for the device, and would wait for ever if a rank is gone.
        while not warm.query():
            if superseded():
                raise SupersededError
            time.sleep(_POLL_S)
        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # The outer `stream` restores the current stream, which a failed capture does not.
        # thread_local lets other threads, such as those of NCCL, continue to use CUDA.
        with (
            torch.cuda.stream(current),
            torch.cuda.graph(graph, pool, side, capture_error_mode="thread_local"),
        ):
            run()
        self._graphs.append(graph)
        return graph.replay

    def drop_graphs(self) -> None:
        for graph in self._graphs:
            graph.reset()  # one that still runs is freed when it ends
        self._graphs.clear()

    def advance(self, tensors: StepTensors, block_size: int) -> None:
        advance(tensors, block_size)

    def measure_peak_bytes(self, run: Callable[[], object]) -> int:
        run()  # compiles kernels, which also allocates memory
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        run()
        torch.cuda.synchronize(self.device)
        peak = torch.cuda.max_memory_allocated(self.device) - before
        torch.cuda.empty_cache()
        return peak

    def cache_bytes(self, settings: WorkerSettings, activations: int) -> int:
        share = settings.memory_utilization
        free, total = torch.cuda.mem_get_info(self.device)
        usable = int(total * (MEMORY_SHARE if share == "auto" else share))
        return usable - (total - free) - activations

    def memory_bytes(self) -> int:
        return torch.cuda.mem_get_info(self.device)[1]

    @property
    def compiling(self) -> bool:
        return Launcher.compiling > 0
