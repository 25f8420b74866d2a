"""CUDA graphs of whole steps. A graph takes one launch instead of hundreds.

A graph repeats the captured kernels with the captured addresses. So every graph reads its columns
from a static buffer and has a fixed size, to which a step is padded.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.distributed import DistError
from tqdm import tqdm

from shared.graph_sizes import GraphSize
from worker_svc.attention.base import Backend
from worker_svc.devices.base import Platform
from worker_svc.errors import CaptureError, DeviceLostError, SupersededError, chain, is_device_lost
from worker_svc.step.arrays import StepArrays
from worker_svc.step.padding import example, padded
from worker_svc.step.tensors import ALIGNMENT, PLACES, StepTensors, host_columns, pack, unpack


def graph_sizes(max_num_seqs: int) -> list[int]:
    """The numbers of sequences for which to capture a graph of decodes.

    They are 1, 2, 4 and 8, multiples of 16 below 256, of 32 below 512 and of 64 from there, and
    `max_num_seqs`. At most an eighth of a large step is padding.
    """
    sizes = [1, 2, 4, 8, *range(16, 256, 16), *range(256, 512, 32), *range(512, 8193, 64)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


class StepGraphs:
    """The graphs of one rank, in memory of their own.

    The constructor captures the largest one with prompts, so that smaller ones fit into its memory,
    and those of decodes. `replay` captures others when they are first needed. All ranks do that in
    the same step.

    Args:
        run: runs a step, given the padded step on the host and its columns on the device. It may
            use only the lengths of the former. Its result, kept for each size, is small or shared.
        largest: the size of the largest graph. Without more tokens than prompts, no graph has
            prompts.
        pool: the memory of the graphs, which may be shared, see `Platform.graph_pool`.
        superseded: whether to give up because nobody waits for these graphs any more.
        lazily: whether the constructor captures only the largest ones, because sequences wait.

    Raises:
        CaptureError: `run` cannot be captured.
        SupersededError: `superseded` returned True.
        DeviceLostError: the device, or another rank, is lost.
    """

    def __init__(
        self,
        platform: Platform,
        backend: Backend,
        run: Callable[[StepArrays, StepTensors], torch.Tensor],
        largest: GraphSize,
        max_model_len: int,
        pool: Any,
        superseded: Callable[[], bool] = lambda: False,
        lazily: bool = False,
    ) -> None:
        self._platform = platform
        self._backend = backend
        self._run = run
        self._max_model_len = max_model_len
        self._sizes = graph_sizes(largest.decodes)
        self._pool = pool
        self._own_places = np.arange(largest.decodes, dtype=np.int32)
        self._replays: dict[GraphSize, Callable[[], None]] = {}
        self._tensors: dict[GraphSize, StepTensors] = {}
        self._results: dict[GraphSize, torch.Tensor] = {}
        self._uploaded: StepArrays | None = None  # the step whose columns are in the buffer
        self.capturing = False
        # Largest first, so that smaller graphs fit into the memory of the largest.
        sizes = [GraphSize(size, 0, 0) for size in self._sizes[::-1]]
        if largest.tokens > largest.prompts:
            sizes.insert(0, largest)
        paging = backend.layout.paging
        self._num_tables = len(paging.tables)
        self._table_entries = largest.decodes * sum(
            -(-max_model_len // kind.block_size) * paging.num_parts_of(kind)
            for kind in paging.tables
        )
        # Of two sizes, because a plan's column may be longer without prompts.
        both = (self._columns(self._example(size)) for size in (largest, sizes[-len(self._sizes)]))
        header = max(len(pack(columns[:-1], pinned=False)) for columns in both)
        room = header + 4 * self._table_entries + ALIGNMENT
        self._buffer = torch.zeros(room, dtype=torch.uint8, device=platform.device)
        if lazily:
            sizes = sizes[: len(sizes) - len(self._sizes) + 1]
        for size in tqdm(sizes, desc="capturing graphs", unit="graph", disable=None):
            self._capture(size, superseded)

    def replay(
        self, step: StepArrays, superseded: Callable[[], bool] = lambda: False
    ) -> tuple[StepTensors, torch.Tensor]:
        """Runs `step`, which only decodes or has the size of a graph -> its columns and the result
        of `run`, both padded and valid until the next step.

        Args:
            superseded: as for the constructor, whose errors it may raise.
        """
        size = step.graph or GraphSize(self._sizes[bisect_left(self._sizes, step.num_seqs)], 0, 0)
        if size not in self._replays:
            self._capture(size, superseded)
        if step.follows is not None and step.follows is self._uploaded:
            self._platform.advance(self._tensors[size], self._backend.block_size)
        else:
            self._upload(self._columns(padded(step, size)))
        self._uploaded = step
        self._replays[size]()
        return self._tensors[size], self._results[size]

    def _capture(self, size: GraphSize, superseded: Callable[[], bool]) -> None:
        if superseded():
            raise SupersededError
        self._uploaded = None
        step = self._example(size)
        columns = self._columns(step)
        self._upload(columns)
        lengths = [*map(len, columns[:-1]), self._table_entries]
        self._tensors[size] = tensors = unpack(self._buffer, lengths)
        if not size.prompts:  # changes nothing yet, but is compiled
            self._platform.advance(tensors, self._backend.block_size)

        def run() -> None:
            self._results[size] = self._run(step, tensors)

        self.capturing = True
        try:
            self._replays[size] = self._platform.capture(run, self._pool, superseded)
        except SupersededError:
            raise
        except RuntimeError as error:
            raise _failed_capture(error, size, superseded()) from error
        finally:
            self.capturing = False

    def _example(self, size: GraphSize) -> StepArrays:
        return example(size, self._max_model_len, self._backend.block_size, self._num_tables)

    def _columns(self, step: StepArrays) -> list[np.ndarray]:
        columns = host_columns(step, self._backend.plan_column(step))
        if not len(step.places):
            columns[PLACES] = self._own_places[: step.num_seqs]
        return columns

    def _upload(self, columns: list[np.ndarray]) -> None:
        host = pack(columns, pinned=self._platform.pinned)
        self._buffer[: len(host)].copy_(host, non_blocking=True)


def _failed_capture(error: RuntimeError, size: GraphSize, superseded: bool) -> Exception:
    """The error with which the process ends. torch's allocator does not recover from a failed
    capture. If another rank or the device caused the failure, a new process may succeed."""
    causes = list(chain(error))
    if superseded or is_device_lost(error) or any(isinstance(e, DistError) for e in causes):
        return DeviceLostError(f"a capture was broken off: {causes[-1]}")
    return CaptureError(
        f"CUDA graphs: a step of {size.decodes} decodes and {size.tokens} tokens of prompts cannot "
        f"be captured: {causes[-1]}; enforce_eager serves without graphs"
    )
