"""The device, the clock and the sizes for measurements. Seconds are measured with CUDA events."""

from __future__ import annotations

import math
import statistics
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
import torch
from pydantic import ValidationError

from bench.gpu.steps import QWEN_0_6B, QWEN_8B, Heads
from bench.workload import Shape
from worker_svc.attention.base import AttentionShape
from worker_svc.attention.choice import BACKENDS as BACKENDS
from worker_svc.attention.paged import PagedBackend
from worker_svc.devices.base import Platform
from worker_svc.errors import StartError
from worker_svc.settings import WorkerSettings

MAX_LAYERS = 64
MAX_WAITING = 4096
Run = Callable[[], object]

ROUNDS = 7
REPLAY_S = 0.004  # duration of a graph, which is long compared with the events' resolution
MAX_CALLS = 400


class Timer:
    def __init__(self) -> None:
        self._side = torch.cuda.Stream()  # only one, because cuBLAS keeps a workspace for each

    def in_graph(self, runs: Sequence[Run]) -> float:
        """Median seconds of one of `runs`, which do the same work on different memory. They take
        turns in a CUDA graph. So the CPU's time does not count, as when decodes are served."""
        side = self._side
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            runs[0]()  # compiles
            estimate = self._elapsed(runs[-1])
        torch.cuda.current_stream().wait_stream(side)
        calls = min(max(math.ceil(REPLAY_S / max(estimate, 1e-6)), len(runs)), MAX_CALLS)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            for call in range(calls):
                runs[call % len(runs)]()
        graph.replay()
        return statistics.median(self._elapsed(graph.replay) for _ in range(ROUNDS)) / calls

    def eager(self, run: Run) -> float:
        """Median seconds of `run`, launched without a graph."""
        run()
        run()
        return statistics.median(self._elapsed(run) for _ in range(ROUNDS))

    def mark(self) -> Any:
        """Marks a moment on the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, earlier: Any, later: Any) -> float:
        """Seconds from one mark to a later one; waits for the later mark."""
        later.synchronize()
        return float(earlier.elapsed_time(later)) / 1000

    def _elapsed(self, run: Run) -> float:
        begin = self.mark()
        run()
        return self.between(begin, self.mark())


class StubTimer(Timer):
    """Runs everything once and measures nothing."""

    def __init__(self) -> None:
        pass  # there may be no GPU

    def in_graph(self, runs: Sequence[Run]) -> float:
        for run in runs:
            run()
        return 1e-3

    def eager(self, run: Run) -> float:
        return self.in_graph([run])

    def mark(self) -> float:
        return time.perf_counter()

    def between(self, earlier: float, later: float) -> float:
        return later - earlier


class Product(NamedTuple):
    """A linear layer: x [T, columns] times a weight [rows, columns], transposed."""

    name: str
    rows: int
    columns: int


@dataclass(frozen=True)
class Sizes:
    """Sizes to measure; the defaults are for a GPU and Qwen3-0.6B."""

    read_bytes: int = 2**30
    rotated_bytes: int = 2**29  # several times the L2 cache
    heads: tuple[tuple[str, Heads], ...] = (("0.6B", QWEN_0_6B), ("8B", QWEN_8B))
    batches: tuple[int, ...] = (1, 64, 256)
    contexts: tuple[int, ...] = (600, 4096)
    matmul: int = 8192
    products: tuple[Product, ...] = (
        Product("0.6B qkv", 4096, 1024),
        Product("0.6B o", 1024, 2048),
        Product("0.6B gate_up", 6144, 1024),
        Product("0.6B down", 1024, 3072),
        Product("0.6B head", 151_936, 1024),
        Product("8B qkv", 6144, 4096),
        Product("8B o", 4096, 4096),
        Product("8B gate_up", 24_576, 4096),
        Product("8B down", 4096, 12_288),
    )
    product_tokens: tuple[int, ...] = (1, 16, 64, 256)
    prompts: tuple[tuple[int, int, int], ...] = (  # sequences, their queries, their context
        (1, 4096, 4096),
        (8, 1024, 1024),
        (1, 2048, 8192),
    )
    prompt_steps: tuple[tuple[int, int], ...] = ((2, 1024), (8, 1024))  # sequences, tokens
    max_model_len: int = 4096
    repeats: int = 30
    greedy_tokens: int = 16
    few: int = 3  # steps to warm up, and steps to profile
    # The reference workload.
    workload: Shape = field(default_factory=Shape)
    cache_tokens: int = 5 * 2**16  # more than the workload has in all
    max_prefill: int = 4096  # prompt tokens of a step
    swept: int = 16  # maximum number of constants of each kind
    rounds: int = 3  # maximum
    clients: int = 4  # number of client processes, and of frontends
    stream_repeats: int = 5

    def layers(self, size: int) -> int:
        """The number of layers of `size` bytes to use in turn, so that the L2 cache holds none."""
        return min(max(math.ceil(self.rotated_bytes / size), 2), MAX_LAYERS)

    @property
    def max_num_batched_tokens(self) -> int:
        return max(self.max_prefill, *(rows * tokens for rows, tokens in self.prompt_steps))


_SHORT = Shape(num_seqs=3, min_input=4, max_input=9, min_output=3, max_output=6)
REHEARSAL = Sizes(
    read_bytes=2**12,
    rotated_bytes=1,
    heads=(("tiny", Heads(4, 2, 16)),),
    batches=(1, 2),
    contexts=(9,),
    matmul=16,
    products=(Product("o", 16, 256),),
    product_tokens=(1, 3),
    prompts=((1, 9, 9), (2, 3, 12)),
    prompt_steps=((1, 6),),
    max_model_len=1100,
    repeats=1,
    greedy_tokens=3,
    few=1,
    workload=_SHORT,
    cache_tokens=2048,
    max_prefill=16,
    swept=1,
    rounds=2,
    clients=2,
    stream_repeats=1,
)
FULL = Sizes()
SMOKE = replace(FULL, rounds=1, stream_repeats=2)


@dataclass(frozen=True)
class Setup:
    """The options of a run, and what follows from them."""

    model: Path
    seed: int
    peer: Path | None = None  # a checkout of nano-vLLM, or a path `vllm` that does not exist
    rehearse: bool = False  # on a CPU, in Triton's interpreter
    smoke: bool = False  # repeat measurements only a few times

    @property
    def device(self) -> torch.device:
        return torch.device("cpu") if self.rehearse else torch.device("cuda", 0)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.rehearse else torch.bfloat16

    @property
    def sizes(self) -> Sizes:
        return REHEARSAL if self.rehearse else SMOKE if self.smoke else FULL

    @cached_property
    def timer(self) -> Timer:
        return StubTimer() if self.rehearse else Timer()

    def platform(self, settings: WorkerSettings) -> Platform:
        if self.rehearse:
            import tests.conftest  # noqa: F401 - repairs Triton's interpreter
            from tests.worker_svc.interpreted import InterpretedPlatform

            return InterpretedPlatform(settings)
        from worker_svc.devices.cuda import CudaPlatform

        return CudaPlatform(settings)

    def settings(self, **settings: Any) -> WorkerSettings:
        """Settings for this model, device and dtype."""
        names: dict[str, Any] = {
            "model": str(self.model),
            "device": self.device.type,
            "dtype": str(self.dtype).removeprefix("torch."),
        }
        try:
            return WorkerSettings(**names, **settings)
        except ValidationError as error:
            pytest.skip(str(error))

    def backend(
        self,
        name: str,
        heads: Heads,
        *,
        layers: int = 1,
        kv_dtype: Literal["auto", "int8", "fp8"] = "auto",
    ) -> PagedBackend[Any]:
        """Returns a backend; skips the test if it is not installed or does not run on this GPU."""
        settings = self.settings(attention=name)
        shape = AttentionShape((None,) * layers, *heads, self.dtype, self.device, kv_dtype)
        try:
            backend = self.platform(settings).attention_backend(settings, shape)
        except StartError as error:
            pytest.skip(str(error))
        assert isinstance(backend, PagedBackend)
        return backend

    def serving(self) -> dict[str, Any]:
        """The variables of `make up` for the reference workload."""
        settings = self.settings()
        return {
            "device": settings.device,
            "dtype": settings.dtype,
            "max_num_seqs": self.sizes.workload.num_seqs,
            "max_num_batched_tokens": self.sizes.max_prefill,
            "max_num_prefill_tokens": self.sizes.max_prefill,
            "max_model_len": self.sizes.max_model_len,
            "max_waiting": MAX_WAITING,
        }

    def generator(self, part: str) -> torch.Generator:
        """Returns the random generator of a part, on the device."""
        return torch.Generator(self.device).manual_seed(zlib.crc32(f"{self.seed} {part}".encode()))
