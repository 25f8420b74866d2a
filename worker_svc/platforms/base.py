"""What a model runner asks of the kind of device it runs on."""

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
        """-> what was fetched, and the seconds that the step took on the device.

        Raises:
            RuntimeError: the device failed.
        """
        ...


class Stopwatch(Protocol):
    """Runs from the start of a step."""

    def fetch(self, tensors: Sequence[torch.Tensor]) -> PendingArrays:
        """Has `tensors` copied to the host once they are there, before anything that is launched
        later can overwrite them."""
        ...


class Platform(ABC):
    """A CPU or a GPU."""

    device: torch.device
    ops: Ops
    captures: bool  # whether decodes may run from graphs
    num_batched_tokens: int  # of a step, unless settings say otherwise
    compiles: bool  # whether launches of another size may have to wait for a compiler
    pinned: bool  # whether host memory is to be pinned for copies

    @abstractmethod
    def choose_dtype(self, setting: str, checkpoint: torch.dtype) -> torch.dtype:
        """
        Args:
            setting: auto or the name of a dtype.
            checkpoint: what the weights have.

        Raises:
            ModelError: the device does not compute in it.
        """

    @abstractmethod
    def attention_backend(self, settings: WorkerSettings, shape: AttentionShape) -> Backend:
        """
        Raises:
            StartError: the one asked for is not there.
        """

    def weight_copies(self) -> Callable[[torch.Tensor, torch.Tensor], object]:
        """-> what copies a tensor on the host (second) into a contiguous one on the device."""
        return torch.Tensor.copy_

    @abstractmethod
    def start(self) -> Stopwatch:
        """Begins a step."""

    def graph_pool(self) -> Any:
        """Memory for graphs that never run at the same time, for `capture`."""
        return None

    @abstractmethod
    def capture(
        self,
        run: Callable[[], None],
        pool: Any = None,
        superseded: Callable[[], bool] = lambda: False,
    ) -> Callable[[], None]:
        """-> what does the same again, on the same tensors.

        Args:
            pool: of `graph_pool`; one whose graphs are all gone cannot be used again.
            superseded: whether to wait no longer for what `run` launches: another rank may be gone.

        Raises:
            SupersededError: see `superseded`.
            RuntimeError: `run` cannot be captured. No other capture may follow in this process.
        """

    @abstractmethod
    def measure_peak_bytes(self, run: Callable[[], object]) -> int:
        """Runs it -> the device memory that it takes beyond what is taken before and after."""

    @abstractmethod
    def cache_bytes(self, settings: WorkerSettings, activations: int) -> int:
        """Memory for KV caches, beside what is taken now and `activations`."""

    @abstractmethod
    def memory_bytes(self) -> int:
        """All memory that a cache could be in, taken or not."""

    @abstractmethod
    def graph_bytes(self) -> int:
        """Device memory taken, for the progress bar of capturing."""

    @property
    def compiling(self) -> bool:
        """Whether a launch may be waiting for a compiler just now."""
        return False
