"""The sampler's kernels against their reference."""

from __future__ import annotations

from itertools import product

import torch

from bench.gpu_check.inputs import count_differences, poisoned
from bench.gpu_check.records import Report
from bench.gpu_check.setup import Setup
from worker_svc.kernels.sampling import chunk_statistics, select_tokens
from worker_svc.kernels.sampling_reference import (
    chunk_statistics_reference,
    select_tokens_reference,
)
from worker_svc.layers.embedding import VocabPartition

# Of sums over a chunk in float32, added in another order and with another exp.
SUM_BOUND = 1e-5
# exp differs in its last bits between a kernel and torch, so a boundary between two tokens moves by
# about 1e-7, and a random number that falls right there may take either. Hence a different token is
# no mismatch if the reference draws it with a number that is this much smaller or larger.
NUDGE = 1e-6
RANKS = 2


def check_sampling(setup: Setup, report: Report) -> None:
    """Rows are greedy, cold, usual and hot in turn. In bfloat16 many logits are equal, so a greedy
    row shows whether the first of the largest is taken."""
    generator, device = setup.generator("sampling"), setup.device
    cases = product(setup.sizes.dtypes, setup.sizes.vocab_sizes, setup.sizes.rows)
    for dtype, vocab_size, rows in cases:
        case = f"{rows} x {vocab_size} {str(dtype).removeprefix('torch.')}"
        shape = (rows, RANKS * VocabPartition(vocab_size, 0, RANKS).shard_size)
        logits = (3 * torch.randn(shape, generator=generator, device=device)).to(dtype)
        logits[:, vocab_size:] = torch.nan
        temperatures = torch.tensor([0.0, 1e-3, 0.6, 1.5], device=device).repeat(rows)[:rows]
        uniforms = torch.rand(rows, generator=generator, device=device, dtype=torch.float64)
        _check_case(report, case, logits, vocab_size, temperatures, uniforms)


def _check_case(
    report: Report,
    case: str,
    logits: torch.Tensor,
    vocab_size: int,
    temperatures: torch.Tensor,
    uniforms: torch.Tensor,
) -> None:
    size = VocabPartition(vocab_size, 0, 1).chunk_size
    with poisoned():
        maxima, sums = chunk_statistics(logits, size, vocab_size, temperatures)
    exact_maxima, exact_sums = chunk_statistics_reference(logits, size, vocab_size, temperatures)
    different = count_differences(maxima, exact_maxima)
    report.check(f"{case}, maxima", different, 0, "maxima that differ")
    error = (sums - exact_sums).abs() / exact_sums.clamp(min=1e-30)
    report.check(f"{case}, sums", float(error.max()), SUM_BOUND)

    def select(part: torch.Tensor, first_token: int) -> torch.Tensor:
        """By a rank that has `part` of the columns."""
        num_tokens = min(max(vocab_size - first_token, 0), part.shape[1])
        first_chunk = first_token // size
        with poisoned():
            return select_tokens(
                part, size, num_tokens, maxima, sums, first_chunk, temperatures, uniforms
            )

    def reference(nudge: float) -> torch.Tensor:
        nudged = (uniforms + nudge).clamp(0, 1 - 2**-53)
        return select_tokens_reference(
            logits, size, vocab_size, maxima, sums, 0, temperatures, nudged
        )

    tokens = select(logits, 0)
    expected = torch.stack([reference(nudge) for nudge in (0, -NUDGE, NUDGE)])
    different = float((tokens != expected[0]).sum())
    mismatches = float((tokens != expected).all(dim=0).sum())
    detail = f"tokens that differ, of {different:.0f} with those on a boundary"
    report.check(f"{case}, tokens", mismatches, 0, detail)
    # What one rank does not have, another one has.
    parts = logits.chunk(RANKS, dim=1)
    dealt = torch.stack([select(part, n * part.shape[1]) for n, part in enumerate(parts)]).amax(0)
    different = float((dealt != tokens).sum())
    report.check(f"{case}, {RANKS} ranks", different, 0, "tokens that differ")
