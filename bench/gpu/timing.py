"""Measures seconds on the GPU with CUDA events."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

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
