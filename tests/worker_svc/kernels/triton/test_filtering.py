from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from tests.worker_svc.device import DEVICE, ON_GPU, by_device, cpu_only, of_cpu
from worker_svc.kernels.logits import BINS, LARGEST_WEIGHT, SIGN, keys_of, logits_of
from worker_svc.kernels.triton.sampling import filtering

LARGEST = float(np.finfo(np.float32).max)
SMALLEST = float(np.finfo(np.float32).smallest_subnormal)
ROWS = torch.tensor([4, 0, 3, 2], dtype=torch.int32)


def run(function: Callable[..., None], *arguments: Any) -> torch.Tensor:
    """Calls `function` with copies on DEVICE -> the last argument as it leaves it."""
    return run_all(function, *arguments)[-1]


def run_all(function: Callable[..., None], *arguments: Any) -> list[torch.Tensor]:
    tensors = [x.to(DEVICE, copy=True) if isinstance(x, torch.Tensor) else x for x in arguments]
    function(*tensors)
    return [x.cpu() for x in tensors if isinstance(x, torch.Tensor)]


both = pytest.mark.parametrize(
    "ops", [filtering, *of_cpu("cpu.sampling.filtering")], ids=lambda ops: ops.__name__
)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the rows of a small vocabulary take several programs."""
    if not ON_GPU:
        monkeypatch.setattr(filtering, "TILE", 256)


def int64(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def random_logits(vocab: int, seed: int) -> torch.Tensor:
    """Logits [5, vocab] of all kinds, as a part of a larger tensor; what follows them is no
    token's."""
    generator = torch.Generator().manual_seed(seed)
    whole = 4 * torch.randn(5, vocab + 24, generator=generator)
    whole[:, vocab:] = 100
    logits = whole[:, :vocab]
    logits[1::2] = logits[1::2].bfloat16().float()
    logits[2] *= 1e30
    logits[torch.rand(logits.shape, generator=generator) < 0.1] = -torch.inf
    edges = [0.0, -0.0, 1e38, -1e38, SMALLEST, -SMALLEST, torch.nan, 0.0]
    logits[4, 1:17:2] = torch.tensor(edges)
    return whole


@cpu_only
def test_keys_are_in_the_order_of_logits() -> None:
    ordered = [-torch.inf, -LARGEST, -2.5, -1.0, -SMALLEST, 0.0, SMALLEST, 1.0, LARGEST, torch.inf]
    keys = keys_of(torch.tensor(ordered))
    assert (keys.diff() > 0).all()
    assert keys.min() >= 0
    assert keys.max() < 2**32
    assert logits_of(keys).tolist() == ordered
    assert keys_of(torch.tensor([-0.0])) == keys_of(torch.tensor([0.0])) == SIGN


def ranges(logits: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The low and shifts of the four `ROWS`: everything, from a logit on, single keys."""
    keys = keys_of(logits[ROWS, 0])
    nothing = keys_of(torch.full((4,), -torch.inf))
    return [
        (nothing, int64(24, 24, 24, 24)),
        (keys, int64(24, 20, 16, 23)),
        (keys, int64(0, -1, 8, 0)),
        (keys_of(torch.tensor([-0.001, 0.0, -2.0, 1.0])), int64(16, 12, 23, 17)),
    ]


def add_up(
    logits: torch.Tensor, weights: torch.Tensor, low: torch.Tensor, shifts: torch.Tensor
) -> torch.Tensor:
    """The bins of logits [4, vocab] with these weights, token by token, from the definition."""
    bins = torch.zeros(4, BINS, dtype=torch.int64)
    for g, (row, keys) in enumerate(zip(logits, keys_of(logits), strict=True)):
        for logit, key, weight in zip(row.tolist(), keys.tolist(), weights[g], strict=True):
            if logit > -torch.inf and key >= low[g] and shifts[g] >= 0:
                number = (key - int(low[g])) >> int(shifts[g])
                if number < BINS:
                    bins[g, number] += weight
    return bins


@both
@pytest.mark.parametrize("vocab", [40, 1001])
def test_counts(vocab: int, ops: ModuleType) -> None:
    """They are added to what is there."""
    logits = random_logits(vocab, seed=vocab)
    ones = torch.ones(4, vocab, dtype=torch.int64)
    for low, shifts in ranges(logits):
        expected = 7 + add_up(logits[ROWS, :vocab], ones, low, shifts)
        seven = torch.full((4, BINS), 7, dtype=torch.int64)
        given = logits, ROWS, vocab, None, None, low, shifts, seven
        assert torch.equal(run(ops.weigh_by_key, *given), expected)


@both
def test_weights(ops: ModuleType) -> None:
    """They are those of torch's exp, up to its expected error; exact where it is 1 or 0."""
    vocab = 1001
    logits = random_logits(vocab, seed=2)
    logits[4, 13] = 0.0  # it was NaN
    chosen = logits[ROWS, :vocab]
    maxima = chosen.amax(1)
    scales = torch.tensor([1.0, 1e30, 1e-29, 0.5])
    weights = ((chosen - maxima[:, None]) * scales[:, None]).exp() * LARGEST_WEIGHT
    for low, shifts in ranges(logits):
        expected = add_up(chosen, weights.long(), low, shifts)
        counts = add_up(chosen, torch.ones(4, vocab, dtype=torch.int64), low, shifts)
        zeros = torch.zeros(4, BINS, dtype=torch.int64)
        bins = run(ops.weigh_by_key, logits, ROWS, vocab, maxima, scales, low, shifts, zeros)
        difference = (bins - expected).abs().double()
        assert (difference <= by_device(cpu=1e-6, gpu=3e-6) * expected + counts).all()
        assert (bins[1] % int(LARGEST_WEIGHT) == 0).all()  # so cold that only the largest count


@both
def test_a_logit_weighs_the_same_in_any_column(ops: ModuleType) -> None:
    """Whatever is beside it, in the middle of a loop or in its remainder."""
    values = 3 * torch.randn(50, generator=torch.Generator().manual_seed(3))
    rows, low, shifts = torch.zeros(1, dtype=torch.int32), keys_of(torch.tensor([-50.0])), int64(24)
    maxima, scales = values.amax().view(1), torch.tensor([1.4])

    def weigh(logits: torch.Tensor, num_tokens: int) -> int:
        arguments = logits[None], rows, num_tokens, maxima, scales, low, shifts
        return int(run(ops.weigh_by_key, *arguments, torch.zeros(1, BINS).long()).sum())

    alone = [weigh(value.expand(1), 1) for value in values]
    for columns in (50, 300, 1001):
        logits = torch.full((columns,), -torch.inf)
        places = torch.arange(50) * (columns // 50) + columns % 50
        logits[places] = values
        assert weigh(logits, columns) == sum(alone)


PICKED = [
    # weights by bin, target, shift, above -> bin, shift, above
    ({0: 5, 3: 2, 200: 1}, 2, 24, 0, 3, 16, 1),
    ({0: 5, 3: 2, 200: 1}, 3, 24, 0, 3, -1, 1),  # just as much: nothing is left to settle
    ({0: 5, 3: 2, 200: 1}, 4, 24, 0, 0, 16, 3),
    ({0: 5, 3: 2, 200: 1}, 4, 5, 1, 3, -1, 2),
    ({0: 5, 3: 2, 200: 1}, 5, 5, 1, 0, 0, 4),
    ({0: 5, 3: 2, 200: 1}, 7, 0, 1, 0, -1, 4),
    ({0: 5, 3: 2, 200: 1}, 100, 9, 1, 0, 1, 4),  # there is no such weight
    ({255: 2**58}, 2**58 - 1, 0, 0, 255, -1, 0),
    ({254: 2**57, 255: 2**57}, 2**57 + 1, 3, 0, 254, 0, 2**57),
    ({}, 1, 24, 0, 0, 16, 0),
    ({3: 1}, 1, -1, 6, 0, -1, 6),  # settled before
]


@pytest.mark.parametrize(
    "pick",
    [filtering.pick_bins, *of_cpu("cpu.sampling.filtering", "pick_bins")],
)
def test_picked_bins(pick: Callable[..., None]) -> None:
    bins = torch.zeros(len(PICKED), BINS, dtype=torch.int64)
    for row, (weights, *_) in enumerate(PICKED):
        for number, weight in weights.items():
            bins[row, number] = weight
    _, targets, shifts, above, numbers, next_shifts, next_above = map(
        list, zip(*PICKED, strict=True)
    )
    low = torch.arange(len(PICKED)) * 1000
    begins = [n << max(shift, 0) for n, shift in zip(numbers, shifts, strict=True)]
    expected = (low + int64(*begins)).tolist(), next_shifts, next_above
    state = [low, int64(*shifts), int64(*above)]
    _, _, *state = run_all(pick, bins, int64(*targets), *state)
    assert tuple(column.tolist() for column in state) == expected


def test_a_rank_without_tokens_launches_nothing() -> None:
    logits, rows, keys = torch.zeros(2, 40), torch.arange(2).int(), torch.zeros(2).long()
    bins = torch.zeros(2, BINS, dtype=torch.int64)
    filtering.weigh_by_key(logits, rows, 0, None, None, keys, keys, bins)
    filtering.weigh_by_key(logits, rows, 0, logits, logits, keys, keys, bins)
    assert not bins.any()
