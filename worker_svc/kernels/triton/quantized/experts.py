"""`Ops.mix_experts` on a GPU. All shapes depend on the number of tokens only, as CUDA graphs need.

Rows are sorted by expert, and each expert's rows begin at a new tile. So all rows of a tile are
multiplied with the matrix of one expert.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce

import torch

from worker_svc.kernels.ops import Experts, PackedWeight
from worker_svc.kernels.triton.gated_activation import activate_and_multiply
from worker_svc.kernels.triton.quantized.products import Grouped, choose_tiles
from worker_svc.kernels.triton.quantized.weights import (
    CodeWeight,
    Int8Weight,
    pack_quantized,
    plain_codes,
    stack,
)
from worker_svc.kernels.triton.rms_norm import sum_rows
from worker_svc.kv_cache import NewTensor
from worker_svc.weights.quantization.formats import QuantizedWeight


def pack_experts(
    weights: Iterable[torch.Tensor | QuantizedWeight],
    count: int,
    dtype: torch.dtype,
    new: NewTensor,
) -> PackedWeight:
    return stack([_pack(each, dtype) for each in weights])


def _pack(weight: torch.Tensor | QuantizedWeight, dtype: torch.dtype) -> Int8Weight | CodeWeight:
    if isinstance(weight, QuantizedWeight):
        return pack_quantized(weight, dtype)
    return plain_codes(weight, dtype)


def mix_experts(
    x: torch.Tensor,
    logits: torch.Tensor,
    gate_up: PackedWeight,
    down: PackedWeight,
    experts: Experts,
) -> torch.Tensor:
    assert isinstance(gate_up, Int8Weight | CodeWeight)  # `pack_experts` makes no others
    assert isinstance(down, Int8Weight | CodeWeight)
    (tokens, per_token), own = (len(x), experts.per_token), experts.of_rank
    # A stable sort takes the first of equal logits.
    values, chosen = (each[:, :per_token] for each in logits.sort(stable=True, descending=True))
    probabilities = values if experts.normalized else logits
    log_sums = values[:, :1] + sum_rows((probabilities - values[:, :1]).exp())[:, None].log()
    factors = (values - log_sums).exp()
    is_own = (chosen >= own.start) & (chosen < own.stop)
    experts_of_rows = torch.where(is_own, chosen - own.start, len(own)).flatten()

    tiles = choose_tiles(-(-tokens * per_token // len(own)), x.dtype)
    places, tile_experts = _places(experts_of_rows, len(own), tiles.rows)
    grouped = Grouped(tile_experts, tiles)
    nowhere = len(tile_experts) * tiles.rows
    sources = places.new_zeros(nowhere + 1)
    sources[places] = torch.arange(len(places), device=x.device) // per_token
    hidden = gate_up.matmul(x[sources[:-1]], None, grouped=grouped)
    hidden = activate_and_multiply(hidden, experts.activation)
    outputs = down.matmul(hidden, None, grouped=grouped)
    of_tokens = outputs[places.clamp(max=nowhere - 1)].view(tokens, per_token, outputs.shape[1])
    of_tokens = torch.where(is_own[:, :, None], of_tokens.float(), 0)
    # Added one by one, because torch may add more rows in another order.
    return reduce(torch.add, (of_tokens * factors[:, :, None]).unbind(1)).to(x.dtype)


def _places(experts: torch.Tensor, count: int, tile: int) -> tuple[torch.Tensor, torch.Tensor]:
    """experts [R] int64, `count` for rows of other ranks -> each row's place, which is after the
    last tile for these, int64 [R], and each tile's expert, −1 for none, int32 [tiles]."""
    rows = torch.arange(len(experts), device=experts.device)
    num_tiles = min(len(rows), len(rows) // tile + count)
    counts = experts.new_zeros(count + 1).scatter_add_(0, experts, torch.ones_like(experts))
    ends = ((counts[:-1] + tile - 1) // tile).cumsum(0)
    tile_experts = torch.searchsorted(ends, rows[:num_tiles], right=True)
    tile_experts = torch.where(tile_experts < count, tile_experts, -1)
    order = experts.argsort(stable=True)
    ordered = experts[order]
    begins = torch.cat((ends.new_zeros(1), ends)) * tile
    place = begins[ordered] + rows - (counts.cumsum(0) - counts)[ordered]
    place = torch.where(ordered < count, place, num_tiles * tile)
    return torch.empty_like(place).scatter_(0, order, place), tile_experts.int()
