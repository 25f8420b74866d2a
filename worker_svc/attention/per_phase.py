"""Uses FlashAttention for prompts and Triton's kernels for decodes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from worker_svc.attention.paged import PagedBackend, PagedMetadata
from worker_svc.attention.triton_backend import TritonBackend, TritonMetadata
from worker_svc.step.arrays import StepArrays
from worker_svc.step.tensors import StepTensors
from worker_svc.step.wire import Int32s


@dataclass(frozen=True)
class PhaseMetadata(PagedMetadata):
    decodes: TritonMetadata | None  # None if there are none, like prompts
    prompts: PagedMetadata | None


class PerPhase(PagedBackend[PhaseMetadata]):
    """Uses one backend for prompts and another for the decodes before them, on one cache. Its name
    is the name of the backend for prompts.

    A library for prompts spends a tile of 64 to 128 queries on the few that share a decode's KV
    head. But it computes everything at once, so it also gets decodes that are too few to keep the
    GPU busy: on an H200, 255 decodes and a prompt of 1,024 tokens take 10.2 ms together and 9.3 ms
    apart, 31 decodes and a prompt of 512 tokens 3.2 ms and 3.5 ms.
    """

    def __init__(self, prompts: PagedBackend[Any], decodes: TritonBackend) -> None:
        super().__init__(prompts.shape, prompts.block_size)
        self.name = prompts.name
        self._prompts = prompts
        self._decodes = decodes

    def plan_column(self, step: StepArrays) -> Int32s:
        return self._decodes.plan_column(_sequences(step, slice(self._num_decodes(step))))

    def plan(self, step: StepArrays, tensors: StepTensors, max_context_len: int) -> PhaseMetadata:
        count = self._num_decodes(step)
        decodes = prompts = None
        if count:
            part = _sequences(step, slice(count))
            decodes = self._decodes.plan(part, tensors, max_context_len)
        if count < step.num_seqs:
            of_prompts = replace(
                tensors,
                query_starts=tensors.query_starts[count:],
                context_lens=tensors.context_lens[count:],
                table_offsets=tensors.table_offsets[count:],
            )
            part = _sequences(step, slice(count, None))
            prompts = self._prompts.plan(part, of_prompts, max_context_len)
        return PhaseMetadata(tensors, decodes, prompts)

    def attend(
        self,
        q: torch.Tensor,
        cache: torch.Tensor,
        metadata: PhaseMetadata,
        window: int | None = None,
    ) -> torch.Tensor:
        out = None
        if metadata.prompts is not None:  # does not compute the rows of decodes
            out = self._prompts.attend(q, cache, metadata.prompts, window)
        if metadata.decodes is not None:
            out = self._decodes.attend(q, cache, metadata.decodes, window, out)
        assert out is not None
        return out

    def _num_decodes(self, step: StepArrays) -> int:
        """How many of the step's first sequences the backend for decodes gets."""
        if step.decodes_only:
            return step.num_seqs
        count = int(np.argmax(step.query_lens > 1))
        return count if count and self._decodes.fills_gpu(count) else 0


def _sequences(step: StepArrays, which: slice) -> StepArrays:
    """The step with the lengths of some of its sequences. A plan reads nothing else of it."""
    return replace(step, query_lens=step.query_lens[which], context_lens=step.context_lens[which])
