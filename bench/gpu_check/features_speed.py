"""What the features of sampling cost a step in which all sequences ask for them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from bench.gpu_check.decode_speed import copy_rate
from bench.gpu_check.kernels_features import BLOCK_SIZE, make_filters, make_histories
from bench.gpu_check.records import Report
from bench.gpu_check.setup import Setup
from worker_svc.distributed import TensorParallel
from worker_svc.filters import keep_likely
from worker_svc.kernels import triton_ops
from worker_svc.layers.embedding import VocabPartition

FILTERS = {
    "top_k 20": (20, 1.0, 0.0),
    "top_p 0.95": (0, 0.95, 0.0),
    "top_k 20, top_p 0.95": (20, 0.95, 0.0),
}


def measure_features(setup: Setup, report: Report) -> None:
    """Against one pass over the logits in float32, read and written."""
    generator, device = setup.generator("features"), setup.device
    rows, vocab = max(setup.sizes.speed_batches), VocabPartition(setup.sizes.vocab_sizes[0], 0, 1)
    logits = 3 * torch.randn(rows, vocab.shard_size, generator=generator, device=device)
    part = vocab.start, vocab.num_tokens
    one_pass = 1e-3 * 2 * logits.nbytes / copy_rate(setup, report)  # us, of GB/s
    histories = make_histories(generator, rows, setup.sizes.speed_contexts[0], vocab.vocab_size)
    every = torch.arange(rows, device=device).int()

    def figure(name: str, seconds: float, against: float | None) -> None:
        report.figure(f"{name}, batch {rows}", 1e6 * seconds, "us", against)

    store = partial(triton_ops.store_tokens, histories.tokens, every, every, every)
    figure("store_tokens", setup.timer.in_graph([store]), None)

    ones = torch.ones(rows, device=device)
    penalize = partial(
        triton_ops.penalize,
        logits.clone(),
        *part,
        histories.tokens,
        BLOCK_SIZE,
        histories.block_table,
        histories.table_offsets,
        every,
        histories.context_lens,
        histories.prompt_lens,
        1.1 * ones,
        0.1 * ones,
        0.1 * ones,
    )
    figure("penalize", setup.timer.in_graph([penalize]), one_pass)

    words = -(-vocab.vocab_size // 32)
    masks = torch.randint(2**31, (rows, words), generator=generator, device=device).int()
    apply_masks = partial(triton_ops.apply_masks, logits.clone(), *part, every, masks)
    figure("apply_masks", setup.timer.in_graph([apply_masks]), one_pass)

    work = logits.clone()
    copied = setup.timer.eager(lambda: work.copy_(logits))
    for name, parameters in FILTERS.items():
        run = _filtering(logits, work, vocab, parameters)
        figure(name, setup.timer.eager(run) - copied, one_pass)


def _filtering(
    logits: torch.Tensor,
    work: torch.Tensor,
    vocab: VocabPartition,
    parameters: tuple[int, float, float],
) -> Callable[[], None]:
    """Of logits that are whole each time; launch by launch, as it is served."""
    filters = make_filters(len(logits), logits.device, *parameters)

    def run() -> None:
        work.copy_(logits)
        limits = filters.top_k, filters.top_p, filters.min_p
        keep_likely(work, vocab, filters.temperatures, *limits, TensorParallel(), triton_ops)

    return run
