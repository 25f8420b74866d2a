"""What precedes sampling where a sequence asks for more than a temperature: kernels against their
references, filters against their definition."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import torch

from bench.gpu_check.inputs import count_differences, poisoned, relative_error
from bench.gpu_check.records import Report
from bench.gpu_check.setup import Setup
from worker_svc.distributed import TensorParallel
from worker_svc.filters import Limit, keep_likely
from worker_svc.kernels import triton_ops
from worker_svc.kernels.token_history import (
    penalize,
    penalize_reference,
    store_tokens,
    store_tokens_reference,
)
from worker_svc.kernels.token_masks import apply_masks, apply_masks_reference
from worker_svc.layers.embedding import VocabPartition

BLOCK_SIZE = 16
SAMPLED = 256  # tokens of the step before
PENALTY_BOUND = 1e-6
# Of probability, that weights of float32 may put on the other side of a boundary.
MASS_BOUND = 1e-6
MIN_P_BOUND = 1e-5  # relative: its boundary is rounded as a logit


@dataclass(frozen=True)
class Histories:
    """Tokens of sequences in blocks anywhere."""

    tokens: torch.Tensor
    block_table: torch.Tensor
    table_offsets: torch.Tensor
    context_lens: torch.Tensor
    prompt_lens: torch.Tensor


def make_histories(
    generator: torch.Generator, rows: int, longest: int, vocab_size: int
) -> Histories:
    """Of half of the longest length on, half of it the prompt's, of tokens that repeat."""
    device = generator.device

    def random(least: int, most: int, size: int) -> torch.Tensor:
        return torch.randint(least, most, (size,), generator=generator, device=device)

    blocks = -(-longest // BLOCK_SIZE)
    tokens = random(0, vocab_size, rows * blocks * BLOCK_SIZE) // 9 * 9
    table = torch.randperm(rows * blocks, generator=generator, device=device)
    context_lens = random(longest // 2, longest + 1, rows)
    return Histories(
        tokens.int(),
        table.int(),
        torch.arange(0, rows * blocks + 1, blocks, device=device).int(),
        context_lens.int(),
        (context_lens // 2).int(),
    )


def check_history(setup: Setup, report: Report) -> None:
    """All that is not written stays as it was. Penalties are those of a rank that has the second
    third of the vocabulary, in rows of the step that are not all."""
    generator, device = setup.generator("token history"), setup.device
    for size in setup.sizes.tokens:
        ids, last = (
            torch.randint(50_000, (n,), generator=generator, device=device).int()
            for n in (size, SAMPLED)
        )
        slots = torch.randperm(2 * size, generator=generator, device=device)[:size] - size // 4
        slots = slots.clamp(min=-1).int()
        ids = torch.where(slots % 3 == 0, -1 - ids % SAMPLED, ids)
        cache = torch.full((2 * size,), -7, dtype=torch.int32, device=device)
        expected = cache.clone()
        store_tokens(cache, slots, ids, last)
        store_tokens_reference(expected, slots, ids, last)
        report.check(f"store {size}", count_differences(cache, expected), 0, "tokens that differ")

    for vocab_size, rows in product(setup.sizes.vocab_sizes, setup.sizes.rows):
        histories = make_histories(generator, 2 * rows, setup.sizes.longest, vocab_size)
        count = vocab_size // 3
        logits = 4 * torch.randn(rows, count + 5, generator=generator, device=device)
        penalties = 0.5 + torch.rand(3, rows, generator=generator, device=device)
        arguments = (
            count,
            count,
            histories.tokens,
            BLOCK_SIZE,
            histories.block_table,
            histories.table_offsets,
            torch.arange(1, 2 * rows, 2, device=device).int(),
            histories.context_lens,
            histories.prompt_lens[1::2].contiguous(),
            *penalties,
        )
        exact, again = logits.clone(), logits.clone()
        penalize_reference(exact, *arguments)
        with poisoned():
            penalize(logits, *arguments)
            penalize(again, *arguments)
        case = f"penalize {rows} x {vocab_size}"
        report.check(case, relative_error(logits, exact), PENALTY_BOUND)
        different = count_differences(logits, again)
        report.check(f"{case}, again", different, 0, "logits that differ")


def check_masks(setup: Setup, report: Report) -> None:
    """Every other row's, on a rank that has the last tokens and padding."""
    generator, device = setup.generator("token masks"), setup.device
    for vocab_size, rows in product(setup.sizes.vocab_sizes, setup.sizes.rows):
        vocab = VocabPartition(vocab_size, 1, 2)
        logits = torch.randn(rows, vocab.shard_size, generator=generator, device=device)
        masked = torch.arange(0, rows, 2, device=device).int()
        size = len(masked), -(-vocab_size // 32)
        bits = (-(2**31), 2**31)
        masks = torch.randint(*bits, size, generator=generator, device=device).int()
        expected = logits.clone()
        apply_masks_reference(expected, vocab.start, vocab.num_tokens, masked, masks)
        apply_masks(logits, vocab.start, vocab.num_tokens, masked, masks)
        different = count_differences(logits, expected)
        report.check(f"{rows} x {vocab_size}", different, 0, "logits that differ")


@dataclass(frozen=True)
class Filters:
    """Of rows that all have them."""

    temperatures: torch.Tensor
    top_k: Limit
    top_p: Limit
    min_p: Limit

    def kept(self, logits: torch.Tensor) -> torch.Tensor:
        """logits [rows, vocab] -> which tokens, [rows, vocab]"""
        vocab = VocabPartition(logits.shape[1], 0, 1)
        padding = vocab.shard_size - vocab.num_tokens
        out = torch.nn.functional.pad(logits, (0, padding), value=torch.nan)
        limits = self.top_k, self.top_p, self.min_p
        keep_likely(out, vocab, self.temperatures, *limits, TensorParallel(), triton_ops)
        return out[:, : vocab.num_tokens] > -torch.inf


def make_filters(
    rows: int, device: torch.device, top_k: int, top_p: float, min_p: float
) -> Filters:
    every = torch.arange(rows, device=device).int()
    none = Limit(every[:0], torch.empty(0, device=device))
    return Filters(
        torch.full((rows,), 0.6, device=device),
        Limit(every, torch.full_like(every, top_k)) if top_k else none,
        Limit(every, torch.full((rows,), top_p, device=device)) if top_p < 1 else none,
        Limit(every, torch.full((rows,), min_p, device=device)) if min_p else none,
    )


def check_filters(setup: Setup, report: Report) -> None:
    """Each by its definition in float64; all at once as one after another; and the same tokens
    wherever in the vocabulary they are. In every other row many logits are equal."""
    generator, device = setup.generator("filters"), setup.device
    for vocab_size, rows in product(setup.sizes.vocab_sizes, setup.sizes.rows):
        logits = 3 * torch.randn(rows, vocab_size, generator=generator, device=device)
        logits[1::2] = logits[1::2].bfloat16().float()
        for top_k, top_p, min_p in ((20, 0.95, 0.05), (vocab_size // 3, 0.5, 1e-3)):
            case = f"{rows} x {vocab_size}, {top_k} {top_p} {min_p}"
            both = make_filters(rows, device, top_k, top_p, min_p)
            left = logits
            for name, filters in _one_by_one(both).items():
                kept = filters.kept(left)
                wrong = _wrong(left, kept, filters)
                report.check(f"{case}, {name}", wrong, 0, "tokens on the wrong side")
                left = left.masked_fill(~kept, -torch.inf)
            kept = both.kept(logits)
            different = count_differences(kept, left > -torch.inf)
            report.check(f"{case}, at once", different, 0, "tokens that differ")
            moved = both.kept(logits.roll(vocab_size // 3, 1))
            different = count_differences(moved, kept.roll(vocab_size // 3, 1))
            report.check(f"{case}, moved", different, 0, "tokens that differ")


def _one_by_one(filters: Filters) -> dict[str, Filters]:
    off = Limit(filters.top_k.rows[:0], filters.top_p.values[:0])
    return {
        "top_k": replace(filters, top_p=off, min_p=off),
        "top_p": replace(filters, top_k=off, min_p=off),
        "min_p": replace(filters, top_k=off, top_p=off),
    }


def _wrong(logits: torch.Tensor, kept: torch.Tensor, filters: Filters) -> float:
    """How many tokens are kept that should not be, or not kept that should, by the only one of
    `filters`."""
    ordered = logits.sort(dim=1, descending=True).values

    def outside(fewest: torch.Tensor, most: torch.Tensor) -> float:
        """Of these many tokens [rows], and those that are equal to the last of them."""
        strict, lax = (ordered.gather(1, n[:, None] - 1) for n in (fewest, most))
        return float(((logits >= strict) & ~kept).sum() + (kept & (logits < lax)).sum())

    if len(filters.top_k.rows):
        ks = filters.top_k.values.long()
        return outside(ks, ks)
    weights = (ordered.double() / filters.temperatures.double()[:, None]).softmax(dim=1)
    if len(filters.top_p.rows):
        before = weights.cumsum(dim=1) - weights
        parts = filters.top_p.values.double()[:, None]
        return outside(*((before < parts + n).sum(dim=1) for n in (-MASS_BOUND, MASS_BOUND)))
    least = filters.min_p.values.double()[:, None] * weights[:, :1]
    return outside(*((weights >= least * (1 + n)).sum(dim=1) for n in (MIN_P_BOUND, -MIN_P_BOUND)))
