"""Seconds on the GPU, by its events."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

Run = Callable[[], object]

ROUNDS = 7
REPLAY_S = 0.004  # of a graph: long beside the resolution of events
MOST_CALLS = 400


class Timer(Protocol):
    def in_graph(self, runs: Sequence[Run]) -> float:
        """Seconds of one of `runs`, which do the same on different memory, from a CUDA graph in
        which they take turns: without the CPU's time, as decodes are served. Median."""
        ...

    def eager(self, run: Run) -> float:
        """Seconds of `run`, launch by launch. Median."""
        ...


class CudaTimer:
    def in_graph(self, runs: Sequence[Run]) -> float:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            runs[0]()  # compiles
            estimate = _elapsed(lambda: runs[-1]())
        torch.cuda.current_stream().wait_stream(side)
        calls = min(max(math.ceil(REPLAY_S / max(estimate, 1e-6)), len(runs)), MOST_CALLS)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in range(calls):
                runs[call % len(runs)]()
        graph.replay()
        return statistics.median(_elapsed(graph.replay) for _ in range(ROUNDS)) / calls

    def eager(self, run: Run) -> float:
        run()
        run()
        return statistics.median(_elapsed(run) for _ in range(ROUNDS))


def _elapsed(run: Run) -> float:
    """On the current stream."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000


def copy_bandwidth(timer: Timer, size: int, device: torch.device) -> float:
    """Bytes/s, read and written, of a copy of `size` bytes on the device."""
    source, target = (torch.empty(size, dtype=torch.uint8, device=device).zero_() for _ in range(2))
    return 2 * size / timer.in_graph([lambda: target.copy_(source)])
