"""Filters top_k, top_p and min_p, applied in this order, as in transformers (the warpers TopK, TopP
and MinP after Temperature).

    keep_likely(logits, vocab, temperatures, filters, tp, ops)

takes a `Limit` for each filter that some row has, which lists the rows that have it. A filter that
no row has costs nothing. A limit must list equal rows on every rank.

Each filter keeps the tokens whose logit is at least a threshold. So it keeps all or none of several
equal logits. The threshold is the largest value at or above which there are k tokens, or top_p of
the mass. A radix select finds it (Alabi et al., "Fast k-selection algorithms for graphics
processing units", 2012). It turns logits into integer keys of equal order and settles eight bits of
the threshold's key at a time, each time from a histogram. Mass is counted in integers, whose sum
does not depend on their order. So neither the batch nor the number of ranks changes which tokens
are kept, and ranks exchange histograms instead of logits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from worker_svc.kernels.logits import BIN_BITS, BINS, inverse_temperatures, keys_of, logits_of
from worker_svc.kernels.ops import Ops
from worker_svc.layers.embedding import VocabPartition
from worker_svc.ranks.distributed import TensorParallel

KEY_BITS = 32


@dataclass(frozen=True)
class Limit:
    """A filter's parameter for the rows that have the filter."""

    rows: torch.Tensor  # int32 [G], each at most once
    values: torch.Tensor  # [G]: top_k int32 >= 1, top_p float32 in (0, 1), min_p in (0, 1]


def keep_likely(
    logits: torch.Tensor,
    vocab: VocabPartition,
    temperatures: torch.Tensor,
    filters: Mapping[str, Limit],
    tp: TensorParallel,
    ops: Ops,
) -> None:
    """Sets logits [F, shard_size] float32 to -inf where top_k excludes them, then where top_p
    excludes any that are left, and then where min_p does.

    Rows whose temperature [F] float32 is 0 do not change. Padding may hold any value and does not
    change. The most likely token is always kept.
    """
    if not filters:
        return
    top_k, top_p, min_p = (filters.get(name) for name in ("top_k", "top_p", "min_p"))
    maxima, thresholds = _maxima_and_floors(logits, vocab, top_k, tp, ops)
    if top_k:
        rows, ks = top_k.rows, top_k.values.long()
        count = partial(ops.weigh_by_key, logits, rows, vocab.num_tokens, None, None)
        thresholds[rows] = _search(count, lambda total: ks, thresholds[rows], maxima[rows], tp, ops)
    if top_p:
        rows, parts = top_p.rows, top_p.values.double()
        scales = inverse_temperatures(temperatures[rows])
        weigh = partial(ops.weigh_by_key, logits, rows, vocab.num_tokens, maxima[rows], scales)

        def part_of(total: torch.Tensor) -> torch.Tensor:
            return (total * parts).ceil_().long()

        thresholds[rows] = _search(weigh, part_of, thresholds[rows], maxima[rows], tp, ops)
    if min_p:
        rows = min_p.rows
        lowest = maxima[rows] + temperatures[rows] * min_p.values.log()
        thresholds[rows] = thresholds[rows].maximum(lowest)
    thresholds.masked_fill_(temperatures == 0, -torch.inf)
    local = logits[:, : vocab.num_tokens]
    local.masked_fill_(local < thresholds[:, None], -torch.inf)


def _maxima_and_floors(
    logits: torch.Tensor, vocab: VocabPartition, top_k: Limit | None, tp: TensorParallel, ops: Ops
) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest logits [F] over all ranks, and lower bounds [F] of the k-th largest logit.

    The bound is the k-th largest of the chunks' maxima: k chunks reach it, so k tokens reach it.
    Few logits above the bound are left to search. The bound is -inf where a row has no top_k, or
    where k is larger than a rank's number of chunks.
    """
    greedy = logits.new_zeros(len(logits))
    maxima, _ = ops.chunk_statistics(logits, vocab.chunk_size, vocab.num_tokens, greedy)
    floors = torch.full_like(greedy, -torch.inf)
    if top_k:
        ordered = maxima[top_k.rows].sort(dim=1, descending=True).values
        ordered = F.pad(ordered, (0, 1), value=-torch.inf)
        kth = (top_k.values - 1).clamp(max=vocab.num_chunks).long()
        floors[top_k.rows] = ordered.gather(1, kth[:, None]).squeeze(1)
    both = torch.stack((maxima.amax(dim=1), floors))
    maxima, floors = both if tp.size == 1 else tp.all_gather(both).amax(0)
    return maxima, floors


def _search(
    add_to_bins: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None],
    targets_of: Callable[[torch.Tensor], torch.Tensor],
    floors: torch.Tensor,
    maxima: torch.Tensor,
    tp: TensorParallel,
    ops: Ops,
) -> torch.Tensor:
    """Finds the largest thresholds [G] float32 at or above which there is enough weight, or others
    that exclude exactly the logits that these exclude. Where there is too little weight, it returns
    floors [G].

    Args:
        add_to_bins: `Ops.weigh_by_key`, called with low, shifts and bins.
        targets_of: the weight [G] int64 at or above floors -> the weight that is enough.
    """
    low = keys_of(floors)
    # The first histogram spans only the range that the row needs, so most rows are done after one
    # or two histograms.
    bits = (keys_of(maxima) - low).clamp_(min=0).double().frexp().exponent
    shifts = (bits.long() - BIN_BITS).clamp_(min=0)
    targets = above = torch.zeros_like(low)
    for number, bins in enumerate(low.new_zeros(KEY_BITS // BIN_BITS, len(low), BINS)):
        add_to_bins(low, shifts, bins)
        tp.all_reduce(bins)
        if number == 0:
            targets = targets_of(bins.sum(dim=1)).clamp_(min=1)
        ops.pick_bins(bins, targets, low, shifts, above)
    return logits_of(low)
