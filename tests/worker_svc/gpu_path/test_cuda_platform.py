"""`CudaPlatform` on a stand-in for torch.cuda that checks signatures and records the order of
calls: there is no GPU here, and the order is what could go wrong."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
import torch

from worker_svc.devices.cuda import CudaPlatform
from worker_svc.devices.pinned_copies import PinnedCopies
from worker_svc.errors import DeviceLostError, ModelError, StartError, is_device_lost
from worker_svc.kernels.triton import batch_invariance
from worker_svc.settings import WorkerSettings

MIB = 1 << 20


class Stream:
    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self._cuda = cuda
        self.name = name

    def wait_stream(self, stream: Stream) -> None:
        self._cuda.log.append(f"{self.name} waits for {stream.name}")

    def synchronize(self) -> None:
        self._cuda.log.append(f"wait for {self.name}")


class Event:
    def __init__(self, cuda: FakeCuda, enable_timing: bool = False, blocking: bool = False) -> None:
        cuda.num_events += 1
        self.name = f"event {cuda.num_events}"
        self.recorded = False
        self.finished = False  # for `query`, where nobody has waited
        self._cuda = cuda
        self._timed = enable_timing
        self._blocking = blocking
        self._polls = 0

    def record(self) -> None:
        self.recorded = True
        self._cuda.log.append(f"{self._cuda.current.name} records {self.name}")

    def query(self) -> bool:
        return self.finished or (self._cuda.finish and not self._timed and self._polled())

    def _polled(self) -> bool:
        """Whether this is not the first poll."""
        self._polls += 1
        return self._polls > 1

    def synchronize(self) -> None:
        assert self.recorded
        self.finished = True
        if not self._blocking:
            self._cuda.num_polling += 1

    def elapsed_time(self, end: Event) -> float:
        assert self._timed
        assert end._timed
        return 4.0


class FakeCuda:
    """Installs itself over torch.cuda."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.num_events = self.num_pools = self.num_streams = self.num_polling = 0
        self.finish = True  # what is polled
        self.current = self.main = Stream(self, "main")
        self.capability = (9, 0)
        self.free, self.total = 70 * MIB, 100 * MIB
        self.allocated, self.peak = 20 * MIB, 28 * MIB
        functions: dict[str, Any] = {
            "is_available": lambda: True,
            "device_count": lambda: 2,
            "set_device": lambda device: self.log.append(f"set {device}"),
            "get_device_capability": lambda device: self.capability,
            "get_device_name": lambda device: "Fake",
            "get_device_properties": lambda device: SimpleNamespace(multi_processor_count=132),
            "current_stream": lambda: self.current,
            "stream": self.stream,
            "graph": self.graph,
            "graph_pool_handle": self.graph_pool_handle,
            "synchronize": lambda device: self.log.append("synchronize"),
            "empty_cache": lambda: None,
            "reset_peak_memory_stats": lambda device: None,
            "memory_allocated": lambda device: self.allocated,
            "max_memory_allocated": lambda device: self.peak,
            "mem_get_info": lambda device: (self.free, self.total),
        }
        for name, function in functions.items():
            patch.setattr(torch.cuda, name, self._checked(name, function))
        patch.setattr(torch.cuda, "Stream", self.new_stream)
        patch.setattr(torch.cuda, "Event", partial(Event, self))
        calls = {name: partial(self.log.append, name) for name in ("replay", "reset")}
        patch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(**calls))
        empty = torch.empty
        patch.setattr(
            torch, "empty", lambda *args, pin_memory=False, **kwargs: empty(*args, **kwargs)
        )

    def _checked(self, name: str, function: Any) -> Any:
        signature = inspect.signature(getattr(torch.cuda, name))

        def call(*args: Any, **kwargs: Any) -> Any:
            signature.bind(*args, **kwargs)  # as the real one would be
            return function(*args, **kwargs)

        return call

    def new_stream(self, device: torch.device) -> Stream:
        self.num_streams += 1
        return Stream(self, "side")

    def graph_pool_handle(self) -> tuple[int, int]:
        self.num_pools += 1
        return 0, self.num_pools

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def graph(
        self, cuda_graph: Any, pool: Any, stream: Stream, capture_error_mode: str
    ) -> Iterator[None]:
        assert capture_error_mode == "thread_local"
        self.log.append(f"begin capture into pool {pool}")
        before, self.current = self.current, stream
        yield  # if it fails, the real one stays on its stream, too
        self.current = before
        self.log.append("end capture")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


def make_platform(**overrides: Any) -> CudaPlatform:
    values = {"tp": 4, "worker_addresses": tuple(f"unix:{rank}" for rank in range(4)), **overrides}
    return CudaPlatform(WorkerSettings(**values))


def test_ranks_share_out_the_gpus_of_their_machine(cuda: FakeCuda) -> None:
    devices = [make_platform(rank=rank).device.index for rank in range(4)]
    assert devices == [0, 1, 0, 1]
    assert cuda.log[-1] == "set cuda:1"


def test_a_gpu_that_is_too_old(cuda: FakeCuda) -> None:
    cuda.capability = (7, 5)
    with pytest.raises(StartError, match=r"Fake has compute capability 7\.5; at least 8\.0"):
        make_platform()


def test_results_are_fetched_before_a_later_step_can_overwrite_them(cuda: FakeCuda) -> None:
    """They are fetched on the one stream, which waits for no other."""
    platform = make_platform(rank=1)
    tokens = torch.tensor([5, 6], dtype=torch.int32)
    cuda.log.clear()
    first = platform.start(0).fetch([tokens, torch.tensor([0.5])])
    assert not first.ready()
    platform.start(0)
    events = ["event 1", "event 2", "event 3", "event 4"]
    assert cuda.log == [f"main records {event}" for event in events]
    arrays, seconds = first.wait()
    assert ([array.tolist() for array in arrays], seconds) == ([[5, 6], [0.5]], 0.004)
    assert first.ready()
    assert not cuda.num_polling  # by threads that wait
    # Whichever thread waits: CUDA would otherwise open another context on GPU 0.
    assert cuda.log[-1] == "set cuda:1"


def test_capture_warms_up_first(cuda: FakeCuda) -> None:
    platform = make_platform()
    pool = platform.graph_pool()
    replay = platform.capture(lambda: cuda.log.append(f"run on {cuda.current.name}"), pool, bool)
    replay()
    assert cuda.log[-9:] == [
        "side waits for main",
        "run on side",
        "run on side",
        "side records event 1",
        "main waits for side",
        "begin capture into pool (0, 1)",
        "run on side",
        "end capture",
        "replay",
    ]


def test_captures_share_a_stream_and_epochs_no_memory(cuda: FakeCuda) -> None:
    """cuBLAS would keep 32 MiB for each stream. A pool whose graphs are all gone cannot be used
    again: torch asserts."""
    platform = make_platform()
    num_streams = cuda.num_streams
    pools = [platform.graph_pool() for _ in range(3)]
    for pool in pools:
        platform.capture(lambda: None, pool, bool)
    assert cuda.num_streams == num_streams
    assert len(set(pools)) == 3


def test_graphs_are_dropped_though_something_refers_to_them(cuda: FakeCuda) -> None:
    platform = make_platform()
    replays = [platform.capture(lambda: None, platform.graph_pool(), bool) for _ in range(2)]
    platform.drop_graphs()
    platform.drop_graphs()
    assert len(replays) == cuda.log.count("reset") == 2


def test_copies_beside_steps_are_made_on_the_ranks_gpu(cuda: FakeCuda) -> None:
    """In a thread that has not chosen one, CUDA would open another context on GPU 0."""
    platform = make_platform(rank=1)
    cuda.log.clear()
    with platform.beside_steps():
        assert cuda.log == ["set cuda:1"]
        assert cuda.current.name == "side"
    assert cuda.log[-1] == "wait for side"


def test_a_newer_epoch_ends_a_capture(cuda: FakeCuda) -> None:
    """Its warm-up may be waiting for a rank that is gone, and capturing would begin by waiting for
    that, for ever."""
    platform = make_platform()
    cuda.finish = False
    asked: list[int] = []

    def superseded() -> bool:
        asked.append(1)
        return len(asked) == 3

    with pytest.raises(RuntimeError, match="a newer epoch begins"):
        platform.capture(lambda: None, platform.graph_pool(), superseded)
    assert len(asked) == 3
    assert not [line for line in cuda.log if line.startswith("begin capture")]


def test_a_failed_capture_leaves_the_stream_as_it_was(cuda: FakeCuda) -> None:
    platform = make_platform()

    def fail() -> None:
        if "begin capture into pool (0, 1)" in cuda.log:
            raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="not permitted"):
        platform.capture(fail, platform.graph_pool(), bool)
    assert cuda.current is cuda.main


def test_memory(cuda: FakeCuda) -> None:
    platform = make_platform()
    with structlog.testing.capture_logs() as logs:
        assert not make_platform(enforce_eager=True).captures
    assert "without CUDA graphs" in logs[0]["event"]
    assert platform.captures
    runs: list[int] = []
    assert platform.measure_peak_bytes(lambda: runs.append(1)) == 8 * MIB
    assert len(runs) == 2  # once to compile, once to measure
    # 90 of 100 MiB, minus 30 that are taken and 8 kept for activations.
    settings = WorkerSettings()
    assert platform.cache_bytes(settings, 8 * MIB) == 52 * MIB
    assert platform.cache_bytes(WorkerSettings(memory_utilization=0.5), 8 * MIB) == 12 * MIB


def test_weights_go_through_two_pinned_buffers(cuda: FakeCuda) -> None:
    """They go in pieces, of other dtypes and of parts of rows; a buffer is refilled only once its
    contents have arrived."""
    copies = PinnedCopies(buffer_bytes=24)
    source = torch.arange(70.0).view(7, 10)
    out = torch.zeros(9, 4, dtype=torch.bfloat16)
    copies(out[1:8], source[:, 3:7])
    assert out[[0, 8]].eq(0).all()
    assert torch.equal(out[1:8], source[:, 3:7].bfloat16())
    assert cuda.log == [f"main records event {1 + n % 2}" for n in range(5)]
    vector = torch.zeros(5)
    copies(vector, torch.arange(5.0))
    assert torch.equal(vector, torch.arange(5.0))


def test_dtypes(cuda: FakeCuda) -> None:
    platform = make_platform()
    assert platform.choose_dtype("auto", torch.float16) == torch.float16
    assert platform.choose_dtype("auto", torch.float32) == torch.bfloat16
    assert platform.choose_dtype("float16", torch.bfloat16) == torch.float16
    with pytest.raises(ModelError, match="dtype: float32 is not served on cuda"):
        platform.choose_dtype("float32", torch.bfloat16)


def test_attention(cuda: FakeCuda) -> None:
    from worker_svc.attention.base import AttentionShape

    shape = AttentionShape((None,), 4, 2, 128, torch.bfloat16, torch.device("cpu"))
    backend = make_platform().attention_backend(WorkerSettings(block_size=32), shape)
    assert (backend.name, backend.block_size) == ("triton", 32)
    with pytest.raises(StartError, match="attention: torch runs on a CPU"):
        make_platform().attention_backend(WorkerSettings(attention="torch"), shape)
    wide = AttentionShape((None,), 129, 1, 128, torch.bfloat16, torch.device("cpu"))
    with pytest.raises(StartError, match="129 query heads per KV head; the limit is 128"):
        make_platform().attention_backend(WorkerSettings(), wide)
    invariant = WorkerSettings(attention="fa3", batch_invariant=True)
    with pytest.raises(StartError, match="attention: fa3 is not batch_invariant"):
        make_platform().attention_backend(invariant, shape)


def test_the_platform_says_whether_kernels_are_batch_invariant(cuda: FakeCuda) -> None:
    for setting in (True, False):
        make_platform(batch_invariant=setting)
        assert batch_invariance.is_on() == setting


LOST = [
    torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
    RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`"),
    DeviceLostError("a capture was broken off: NCCL error"),
]
NOT_LOST = [
    torch.AcceleratorError("CUDA error: out of memory"),
    torch.AcceleratorError("CUDA error: no kernel image is available for execution on the device"),
    RuntimeError("Triton Error [CUDA]: invalid argument"),
    torch.AcceleratorError("CUDA error: operation not permitted when stream is capturing"),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("shape"),
    ValueError("CUDA error"),
]


@pytest.mark.parametrize(
    ("error", "lost"), [(e, True) for e in LOST] + [(e, False) for e in NOT_LOST]
)
def test_which_errors_lose_the_device(error: Exception, lost: bool) -> None:
    assert is_device_lost(error) == lost
    # Even if ending a capture, or a rank's answer, has covered it up.
    covering = RuntimeError("operation failed due to a previous error during capture")
    covering.__context__ = error
    assert is_device_lost(covering) == lost
