"""The interface of the kinds of device that a model runner can run on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from numpy.typing import NDArray

from worker_svc.attention.base import AttentionShape, Backend
from worker_svc.kernels.ops import Ops
from worker_svc.settings import WorkerSettings


class PendingArrays(Protocol):
    """The results of a step that the device may still be working on."""

    def ready(self) -> bool:
        """Whether `wait` would return at once."""
        ...

    def wait(self) -> tuple[list[NDArray[Any]], float]:
        """Returns the arrays fetched and the seconds that the step took on the device.

        Raises:
            RuntimeError: the device failed.
        """
        ...


class Stopwatch(Protocol):
    """Times a step, from its start."""

    def fetch(self, tensors: Sequence[torch.Tensor]) -> PendingArrays:
        """Has `tensors` copied to the host once they are ready, before anything launched later can
        overwrite them."""
        ...


class Platform(ABC):
    """A CPU or a GPU."""

    device: torch.device
    ops: Ops
    captures: bool  # whether decodes may run from graphs
    num_batched_tokens: int  # of a step, unless settings say otherwise
    compiles: bool  # whether launches of a new size may have to wait for a compiler
    pinned: bool  # whether host memory is to be pinned for copies

    @abstractmethod
    def choose_dtype(self, setting: str, checkpoint: torch.dtype) -> torch.dtype:
        """Chooses the dtype to compute in.

        Args:
            setting: auto or the name of a dtype.
            checkpoint: the dtype of the weights.

        Raises:
            ModelError: the device does not compute in it.
        """

    @abstractmethod
    def attention_backend(self, settings: WorkerSettings, shape: AttentionShape) -> Backend:
        """Makes the attention backend.

        Raises:
            StartError: the one asked for is not available.
        """

    def weight_copies(self) -> Callable[[torch.Tensor, torch.Tensor], object]:
        """Returns a function that copies a host tensor (second) into a contiguous device tensor."""
        return torch.Tensor.copy_

    @abstractmethod
    def start(self, multiply_adds: int) -> Stopwatch:
        """Begins a step of about so much work."""

    def graph_pool(self) -> Any:
        """Memory for `capture`, shared by graphs that never run at the same time."""
        return None

    @abstractmethod
    def capture(
        self,
        run: Callable[[], None],
        pool: Any = None,
        superseded: Callable[[], bool] = lambda: False,
    ) -> Callable[[], None]:
        """Captures `run` -> a function that repeats it, on the same tensors.

        Args:
            pool: from `graph_pool`; unusable once all its graphs are gone.
            superseded: whether to stop waiting for what `run` launches: another rank may be gone.

        Raises:
            SupersededError: see `superseded`.
            RuntimeError: `run` cannot be captured. No other capture may follow in this process.
        """

    @abstractmethod
    def measure_peak_bytes(self, run: Callable[[], object]) -> int:
        """Calls `run` -> the device memory it takes beyond what is taken before and after."""

    @abstractmethod
    def cache_bytes(self, settings: WorkerSettings, activations: int) -> int:
        """Memory left for KV caches besides what is taken now and `activations`."""

    @abstractmethod
    def memory_bytes(self) -> int:
        """All memory that could hold a cache, taken or not."""

    @abstractmethod
    def graph_bytes(self) -> int:
        """Device memory in use, for the progress bar of capturing."""

    @property
    def compiling(self) -> bool:
        """Whether a launch may be waiting for a compiler right now."""
        return False
