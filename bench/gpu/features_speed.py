"""Measures the cost of sampling features in a step in which all sequences use them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from bench.gpu.ceilings import bandwidth
from bench.gpu.records import Report
from bench.gpu.setup import Setup
from worker_svc.distributed import TensorParallel
from worker_svc.kernels.triton import ops as triton_ops
from worker_svc.layers.embedding import VocabPartition
from worker_svc.sampling.filters import Limit, keep_likely

BLOCK_SIZE = 64
FILTERS = {
    "top_k 20": (20, 1.0),
    "top_p 0.95": (0, 0.95),
    "top_k 20, top_p 0.95": (20, 0.95),
}


class Batch:
    """The logits of the largest batch, and the inputs of sampling features.

    Figures are compared with a pass that reads and writes the logits in float32.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.generator = setup.generator("features")
        self.rows = max(setup.sizes.batches)
        self.vocab = VocabPartition(setup.sizes.vocab_size, 0, 1)
        size = self.rows, self.vocab.shard_size
        self.logits = 3 * torch.randn(size, generator=self.generator, device=setup.device)
        self.every = torch.arange(self.rows, dtype=torch.int32, device=setup.device)

    @property
    def part(self) -> tuple[int, int]:
        return self.vocab.start, self.vocab.num_tokens

    def integers(self, below: int, *size: int) -> torch.Tensor:
        device = self.setup.device
        return torch.randint(below, size, generator=self.generator, device=device).int()

    def figure(self, report: Report, name: str, seconds: float) -> None:
        one_pass = 1e-3 * 2 * self.logits.nbytes / bandwidth(self.setup, report)  # us, from GB/s
        report.figure(f"{name}, batch {self.rows}", 1e6 * seconds, "us", one_pass)


@pytest.fixture(scope="module")
def batch(setup: Setup) -> Batch:
    return Batch(setup)


def measure_history(batch: Batch, report: Report) -> None:
    """Measures contexts of one length whose tokens repeat; half of each is the prompt."""
    context, in_graph = batch.setup.sizes.contexts[0], batch.setup.timer.in_graph
    blocks = -(-context // BLOCK_SIZE)
    tokens = batch.integers(batch.vocab.vocab_size, batch.rows * blocks * BLOCK_SIZE) // 9 * 9
    offsets = torch.arange(batch.rows + 1, dtype=torch.int32, device=tokens.device) * blocks
    contexts = torch.full_like(batch.every, context)
    store = partial(triton_ops.store_tokens, tokens, batch.every, batch.every, batch.every)
    report.figure(f"store_tokens, batch {batch.rows}", 1e6 * in_graph([store]), "us")
    penalize = partial(
        triton_ops.penalize,
        batch.logits.clone(),
        *batch.part,
        tokens,
        BLOCK_SIZE,
        torch.arange(batch.rows * blocks, dtype=torch.int32, device=tokens.device),
        offsets,
        batch.every,
        contexts,
        contexts // 2,
        *(torch.full((batch.rows,), value, device=tokens.device) for value in (1.1, 0.1, 0.1)),
    )
    batch.figure(report, "penalize", in_graph([penalize]))


def measure_masks(batch: Batch, report: Report) -> None:
    masks = batch.integers(2**31 - 1, batch.rows, -(-batch.vocab.vocab_size // 32))
    run = partial(triton_ops.apply_masks, batch.logits.clone(), *batch.part, batch.every, masks)
    batch.figure(report, "apply_masks", batch.setup.timer.in_graph([run]))


@pytest.mark.parametrize("name", FILTERS)
def measure_filters(batch: Batch, report: Report, name: str) -> None:
    """Filters new logits each time, with single launches as in serving."""
    work = batch.logits.clone()
    copied = batch.setup.timer.eager(lambda: work.copy_(batch.logits))
    seconds = batch.setup.timer.eager(_filtering(batch, work, *FILTERS[name]))
    batch.figure(report, name, seconds - copied)


def _filtering(batch: Batch, work: torch.Tensor, top_k: int, top_p: float) -> Callable[[], None]:
    def limit(value: float, dtype: torch.dtype) -> Limit:
        rows = batch.every
        return Limit(rows, torch.full((len(rows),), value, dtype=dtype, device=rows.device))

    filters = {}
    if top_k > 0:
        filters["top_k"] = limit(top_k, torch.int32)
    if top_p < 1:
        filters["top_p"] = limit(top_p, torch.float32)
    temperatures = torch.ones(batch.rows, device=work.device)

    def run() -> None:
        work.copy_(batch.logits)
        keep_likely(work, batch.vocab, temperatures, filters, TensorParallel(), triton_ops)

    return run
