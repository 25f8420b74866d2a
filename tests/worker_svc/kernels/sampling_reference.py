"""Sampling in two levels, first a chunk of the vocabulary and then a token in it, in PyTorch.

This is what a CPU runs, and what the kernels of `kernels.triton.sampling.selection` must equal.
Greedy is the same as drawing with the number 0 from weights that are 1 for the largest logit and 0
elsewhere, so both take one path. (Inverse transform sampling: Devroye, "Non-Uniform Random Variate
Generation", 1986, with a two-level search.)
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from worker_svc.kernels.logits import inverse_temperatures


def chunk_statistics(
    logits: torch.Tensor, chunk_size: int, num_tokens: int, temperatures: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [N, chunks · chunk_size], of which the first num_tokens columns are valid and the
    others may hold anything; temperatures [N] float32.

    -> per chunk the largest logit (-inf if none is valid), and the sum of
    exp((logit - largest) / temperature), 0 in a greedy row: both [N, chunks] float32.
    """
    shape = len(logits), logits.shape[1] // chunk_size
    maxima = torch.full(shape, -torch.inf, device=logits.device)
    sums = torch.zeros(shape, device=logits.device)
    drawing = temperatures.nonzero().squeeze(1)
    inverse = inverse_temperatures(temperatures)[drawing, None, None]
    for place, chunks in _valid_chunks(logits, chunk_size, num_tokens):
        largest = chunks.amax(dim=2).float()
        maxima[:, place] = largest
        if len(drawing):
            weights = chunks[drawing].float().sub_(_finite(largest)[drawing].unsqueeze(2))
            sums[drawing, place] = weights.mul_(inverse).exp_().sum(dim=2)
    return maxima, sums


def select_tokens(
    logits: torch.Tensor,
    chunk_size: int,
    num_tokens: int,
    maxima: torch.Tensor,
    sums: torch.Tensor,
    first_chunk: int,
    temperatures: torch.Tensor,
    uniforms: torch.Tensor,
) -> torch.Tensor:
    """This rank's logits as above, where chunk number first_chunk of the vocabulary is its first;
    maxima, sums [N, chunks of all ranks] in the vocabulary's order; uniforms [N] float64 in [0, 1).

    -> token ids [N] int32: the first of the largest logits where the temperature is 0, else the
    inverse of the cumulative distribution at the uniform number, in float64 so that rounding moves
    next to no mass between tokens. -1 where the chosen chunk is another rank's.
    """
    greedy = (temperatures == 0).unsqueeze(1)
    inverse = inverse_temperatures(temperatures).unsqueeze(1)
    uniforms = uniforms.unsqueeze(1).masked_fill(greedy, 0)

    top = maxima.amax(dim=1, keepdim=True)
    scale = maxima.sub(_finite(top)).mul_(inverse).exp_()
    weights = torch.where(greedy, maxima == top, sums.double() * scale.double())
    chunk, fraction = _invert(weights, uniforms)

    num_chunks = logits.shape[1] // chunk_size
    local = chunk - first_chunk
    here = (local >= 0) & (local < num_chunks)
    start = local.clamp(0, num_chunks - 1) * chunk_size
    columns = start + torch.arange(chunk_size, device=logits.device)
    values = logits.gather(1, columns).float().masked_fill_(columns >= num_tokens, -torch.inf)
    top = maxima.gather(1, chunk)
    weights = values.sub(_finite(top)).mul_(inverse).exp_().double()
    weights = torch.where(greedy, values == top, weights)
    token, _ = _invert(weights, fraction)
    return (chunk * chunk_size + token).masked_fill_(~here, -1).squeeze(1).int()


def _invert(weights: torch.Tensor, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """weights [N, K] float64 >= 0, uniforms [N, 1] -> [N, 1] each: the first index at which the
    cumulative sum passes that part of the total, and how far into its weight that is, in [0, 1].

    Never an index of weight 0, except 0 if all are: neither where rounding puts the target past the
    end nor where it makes a sum grow that should not.
    """
    cumulative = weights.cumsum(dim=1)
    target = uniforms * cumulative[:, -1:]
    possible = weights > 0
    indices = torch.arange(weights.shape[1], device=weights.device)
    last = torch.where(possible, indices, 0).amax(dim=1, keepdim=True)
    passed = torch.where(possible & (cumulative > target), indices, last)
    index = passed.amin(dim=1, keepdim=True)
    weight = weights.gather(1, index)
    fraction = (target - (cumulative.gather(1, index) - weight)) / weight.clamp(min=1e-300)
    return index, fraction.clamp_(0, 1)


def _valid_chunks(
    logits: torch.Tensor, chunk_size: int, num_tokens: int
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yields the whole chunks, then the one in which the vocabulary ends: their numbers, and their
    valid logits [N, chunks, tokens]."""
    whole = num_tokens // chunk_size
    if whole:
        yield slice(whole), logits[:, : whole * chunk_size].unflatten(1, (whole, chunk_size))
    if num_tokens > whole * chunk_size:
        yield slice(whole, whole + 1), logits[:, None, whole * chunk_size : num_tokens]


def _finite(largest: torch.Tensor) -> torch.Tensor:
    """The value to subtract from logits: 0 where all are -inf, which itself would make them NaN."""
    return largest.masked_fill(largest == -torch.inf, 0)
