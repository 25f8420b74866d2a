"""CUDA graphs for steps that only decode. A graph takes one launch instead of hundreds.

A graph repeats the captured kernels with the captured addresses. So every graph reads its columns
from a static buffer and has a fixed number of sequences, to which a step is padded.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch.distributed import DistError
from tqdm import tqdm

from worker_svc.attention.base import Backend
from worker_svc.devices.base import Platform
from worker_svc.errors import CaptureError, DeviceLostError, SupersededError, chain, is_device_lost
from worker_svc.step.decode import StepArrays, made_up_step
from worker_svc.step.tensors import ALIGNMENT, StepTensors, host_columns, pack, padded, unpack


def graph_sizes(max_num_seqs: int) -> list[int]:
    """The numbers of sequences for which to capture a graph.

    They are 1, 2, 4 and 8, multiples of 16 below 256, of 32 below 512 and of 64 from there, and
    `max_num_seqs`. At most an eighth of a large step is padding.
    """
    sizes = [1, 2, 4, 8, *range(16, 256, 16), *range(256, 512, 32), *range(512, 8193, 64)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


class DecodeGraphs:
    """The graphs of all sizes. The constructor captures them, into memory of their own.

    Args:
        run: runs a step, given the padded step on the host and its columns on the device. It may
            use only the number of sequences of the former. It leaves the sampled tokens and the
            logits in tensors that outlive the call, and returns the logits.
        max_blocks: the maximum number of blocks of one sequence.
        superseded: whether to give up because nobody waits for these graphs any more.

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
        max_num_seqs: int,
        max_blocks: int,
        superseded: Callable[[], bool] = lambda: False,
    ) -> None:
        self._platform = platform
        self._backend = backend
        self._sizes = graph_sizes(max_num_seqs)
        self._replays: dict[int, Callable[[], None]] = {}
        self._tensors: dict[int, StepTensors] = {}
        self._logits: dict[int, torch.Tensor] = {}
        largest = padded(_nothing(), self._sizes[-1])
        header = pack(self._columns(largest), pinned=False)
        table_entries = max_num_seqs * max_blocks
        size = len(header) + 4 * table_entries + ALIGNMENT
        self._buffer = torch.zeros(size, dtype=torch.uint8, device=platform.device)
        # Largest first, so that smaller graphs fit into the memory of the largest.
        pool = platform.graph_pool()
        for size in tqdm(self._sizes[::-1], desc="capturing graphs", unit="graph", disable=None):
            if superseded():
                raise SupersededError
            step = padded(_nothing(), size)
            arrays = self._columns(step)
            self._upload(step)
            lengths = [len(array) for array in arrays]
            lengths[-1] = table_entries
            self._tensors[size] = unpack(self._buffer, lengths)
            try:
                capture = partial(self._run, run, step)
                self._replays[size] = platform.capture(capture, pool, superseded)
            except SupersededError:
                raise
            except RuntimeError as error:
                raise _failed_capture(error, size, superseded()) from error

    def replay(self, step: StepArrays) -> tuple[StepTensors, torch.Tensor]:
        """Runs `step`, which decodes up to `max_num_seqs` sequences and nothing else -> its columns
        and logits, both padded and valid until the next step."""
        size = self._sizes[bisect_left(self._sizes, step.num_seqs)]
        self._upload(padded(step, size))
        self._replays[size]()
        return self._tensors[size], self._logits[size]

    def _run(
        self, run: Callable[[StepArrays, StepTensors], torch.Tensor], step: StepArrays
    ) -> None:
        size = step.num_seqs
        self._logits[size] = run(step, self._tensors[size])

    def _columns(self, step: StepArrays) -> list[np.ndarray]:
        return host_columns(step, self._backend.plan_column(step))

    def _upload(self, step: StepArrays) -> None:
        host = pack(self._columns(step), pinned=self._platform.pinned)
        self._buffer[: len(host)].copy_(host, non_blocking=True)


def _failed_capture(error: RuntimeError, size: int, superseded: bool) -> Exception:
    """The error with which the process ends. torch's allocator does not recover from a failed
    capture. If another rank or the device caused the failure, a new process may succeed."""
    causes = list(chain(error))
    if superseded or is_device_lost(error) or any(isinstance(e, DistError) for e in causes):
        return DeviceLostError(f"a capture was broken off: {causes[-1]}")
    return CaptureError(
        f"CUDA graphs: a step of {size} sequences cannot be captured: {causes[-1]}; "
        "enforce_eager serves without graphs"
    )


def _nothing() -> StepArrays:
    none = np.zeros(0, np.int32)
    return made_up_step(none, none, none, np.zeros(1, np.int32), block_size=1)
