"""The interface of a device on which a model runner runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from numpy.typing import NDArray

from worker_svc.attention.base import AttentionShape, Backend
from worker_svc.kept_memory.device import DeviceMemory
from worker_svc.kept_memory.host import HostMemory
from worker_svc.kernels.ops import Ops
from worker_svc.ranks.distributed import Ranks
from worker_svc.settings import WorkerSettings
from worker_svc.step.tensors import StepTensors


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
    """Measures the time of a step from its start."""

    def fetch(self, tensors: Sequence[torch.Tensor]) -> PendingArrays:
        """Copies `tensors` to the host once they are ready. The copies finish before a later launch
        can overwrite `tensors`."""
        ...


class Platform(ABC):
    """A CPU or a GPU."""

    device: torch.device
    ops: Ops
    captures: bool  # whether decodes may run from graphs
    num_batched_tokens: int  # the default maximum of tokens in a step
    compiles: bool  # whether a launch of a new size may have to wait for a compiler
    pinned: bool  # whether to pin host memory for copies

    @abstractmethod
    def choose_dtype(self, setting: str, checkpoint: torch.dtype) -> torch.dtype:
        """Chooses the dtype to compute in.

        Args:
            setting: auto or the name of a dtype.
            checkpoint: the dtype of the weights.

        Raises:
            ModelError: the device does not compute in that dtype.
        """

    def choose_num_batched_tokens(self, settings: WorkerSettings) -> int:
        """The maximum number of tokens in a step."""
        if settings.max_num_batched_tokens == "auto":
            return max(self.num_batched_tokens, settings.max_num_seqs)
        return settings.max_num_batched_tokens

    @abstractmethod
    def attention_backend(self, settings: WorkerSettings, shape: AttentionShape) -> Backend:
        """Makes the attention backend.

        Raises:
            StartError: the backend that the settings ask for is not available.
        """

    def weight_copies(self) -> Callable[[torch.Tensor, torch.Tensor], object]:
        """Returns a function that copies a host tensor (second) into a contiguous device tensor."""
        return torch.Tensor.copy_

    def memory(self) -> DeviceMemory | None:
        """Returns memory that outlives this process; None if the device has none."""
        return HostMemory()

    def prepare(
        self, hidden_states: Callable[..., torch.Tensor], backend: Backend, ranks: Ranks
    ) -> Callable[..., torch.Tensor]:
        """Returns the device's way to do what a model's `Decoder.hidden_states` does."""
        return hidden_states

    def beside_steps(self) -> AbstractContextManager[object]:
        """Lets the current thread copy beside steps. The copies are done when the context ends."""
        return nullcontext()

    @abstractmethod
    def start(self, multiply_adds: int) -> Stopwatch:
        """Begins a step of about `multiply_adds` multiply-adds."""

    def graph_pool(self) -> Any:
        """Returns memory for `capture`, shared by graphs that never run at the same time."""
        return None

    def capture(
        self, run: Callable[[], None], pool: Any, superseded: Callable[[], bool]
    ) -> Callable[[], None]:
        """Captures `run` -> a function that repeats it on the tensors that `run` used. Called, as
        `advance` is, only if `captures`.

        Args:
            pool: from `graph_pool`. It cannot be used again once all its graphs are gone.
            superseded: whether to stop waiting for the work that `run` launches, because another
                rank may be gone.

        Raises:
            SupersededError: see `superseded`.
            RuntimeError: `run` cannot be captured. No other capture may follow in this process.
        """
        raise NotImplementedError

    def drop_graphs(self) -> None:
        """Ends all that was captured, whoever still refers to it. NCCL's connections cannot be
        closed before the graphs that use them."""
        return

    def advance(self, tensors: StepTensors, block_size: int) -> None:
        """Changes the columns of a step of decodes to those of the next step of its run: each
        sequence continues with the token of its row. Rows without a context, which are padding,
        stay as they are."""
        raise NotImplementedError

    @abstractmethod
    def measure_peak_bytes(self, run: Callable[[], object]) -> int:
        """Calls `run` -> the device memory that it uses only while it runs."""

    @abstractmethod
    def cache_bytes(self, settings: WorkerSettings, activations: int) -> int:
        """The memory left for KV caches, after the memory in use now and `activations` bytes."""

    @abstractmethod
    def memory_bytes(self) -> int:
        """All memory that could hold a cache, whether it is free or in use."""

    @property
    def compiling(self) -> bool:
        """Whether a launch may be waiting for a compiler right now."""
        return False
