"""Mixtures of experts against sums of the products that each token's experts make alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.worker_svc.device import DEVICE, cpu_only, generator
from tests.worker_svc.kernels.cpu import eager_ops as cpu_ops
from tests.worker_svc.kernels.triton.precision import poisoned_memory
from tests.worker_svc.kernels.triton.weights import random_weight
from worker_svc.kernels.ops import Experts
from worker_svc.kernels.triton import ops as triton_ops

HIDDEN, SIZE = 64, 32
EXPERTS = Experts(11, range(11), 3, True, "silu")
FORMATS = ("none", "int8", "int8 with zeros", "int4", "int4 with zeros", "fp8")
CPU = pytest.param(cpu_ops, marks=cpu_only)
devices = pytest.mark.parametrize("ops", [CPU, triton_ops], ids=["cpu", "triton"])


def make_weights(name: str, out: int, columns: int, seed: int) -> list[Any]:
    """A matrix per expert. Of those with zeros, the first has none."""
    random = generator(seed)
    if name == "none":
        size = EXPERTS.count, out, columns
        return [*torch.randn(size, generator=random, device=random.device)]
    format_: Any = name.split()[0]
    groups = columns // 32 if format_ == "int4" else 1
    found = []
    for number in range(EXPERTS.count):
        zeros = "zeros" in name and number > 0
        weight = random_weight(format_, out, columns, groups=groups, zeros=zeros, seed=number)
        found.append(replace(weight, scales=weight.scales / 256))
    return found


def pack_experts(ops: Any, weights: list[Any]) -> Any:
    return ops.pack_experts(
        weights, len(weights), torch.float32, lambda shape, dtype: torch.empty(shape, dtype=dtype)
    )


def choice(logits: list[float], experts: Experts) -> dict[int, float]:
    """The factors of a token's experts."""
    order = sorted(range(len(logits)), key=lambda expert: (-logits[expert], expert))
    chosen = order[: experts.per_token]
    weights = torch.tensor(logits, dtype=torch.float64).sub(max(logits)).exp()
    total = weights[chosen].sum() if experts.normalized else weights.sum()
    return {expert: float(weights[expert] / total) for expert in chosen}


def check(ops: Any, name: str, logits: torch.Tensor, experts: Experts) -> torch.Tensor:
    random = generator(len(logits))
    x = torch.randn(len(logits), HIDDEN, generator=random, device=random.device)
    gate_up, down = make_weights(name, 2 * SIZE, HIDDEN, 1), make_weights(name, HIDDEN, SIZE, 2)
    own = slice(experts.of_rank.start, experts.of_rank.stop)
    packed = [pack_experts(ops, each[own]) for each in (gate_up, down)]
    with poisoned_memory():
        out = ops.mix_experts(x, logits, ops.unpack(packed[0].state()), packed[1], experts)
    expected = torch.zeros_like(x)
    for row, of_row in enumerate(logits.tolist()):
        for expert, factor in choice(of_row, experts).items():
            if expert in experts.of_rank:
                hidden = ops.pack(gate_up[expert], torch.float32).matmul(x[row : row + 1], None)
                hidden = ops.activate_and_multiply(hidden, experts.activation)
                added = ops.pack(down[expert], torch.float32).matmul(hidden, None)
                expected[row] += factor * added[0]
    scale = expected.abs().max() if len(expected) else 0
    # The inputs of an expert without zeros are quantized on a GPU if it is packed alone.
    error = 1e-2 if name == "int8 with zeros" else 1e-5
    assert (out - expected).abs().le(error * scale + 1e-6).all()
    return out


def some_logits(tokens: int) -> torch.Tensor:
    """With many that are equal."""
    random = generator(tokens)
    size = tokens, EXPERTS.count
    return torch.randint(-3, 3, size, generator=random, device=random.device).float() / 2


@devices
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("tokens", [0, 1, 23])
def test_each_token_takes_its_experts(ops: Any, name: str, tokens: int) -> None:
    check(ops, name, some_logits(tokens), EXPERTS)


@devices
@pytest.mark.parametrize("normalized", [True, False])
def test_of_equal_logits_the_first_is_taken(ops: Any, normalized: bool) -> None:
    logits = torch.zeros(3, EXPERTS.count, device=DEVICE)
    logits[1, 5:] = 1.0
    logits[2, ::2] = -1.0
    check(ops, "none", logits, replace(EXPERTS, normalized=normalized))


@devices
def test_ranks_add_up(ops: Any) -> None:
    """One has experts that no token takes."""
    logits = some_logits(9)
    logits[:, 9:] = -9.0
    ranges = range(4), range(4, 9), range(9, 11)
    parts = [check(ops, "none", logits, replace(EXPERTS, of_rank=each)) for each in ranges]
    assert not parts[2].any()
    whole = check(ops, "none", logits, EXPERTS)
    torch.testing.assert_close(sum(parts), whole, rtol=1e-5, atol=1e-4)


@devices
def test_all_experts_and_one(ops: Any) -> None:
    for per_token in (1, EXPERTS.count):
        check(ops, "int8", some_logits(7), replace(EXPERTS, per_token=per_token))


@devices
def test_extreme_logits(ops: Any) -> None:
    """Those so low that their factor is 0, and rows that a broken model makes."""
    logits = some_logits(4)
    logits[0] = -1e30
    logits[0, 7] = 1e30
    logits[1, 2:] = -torch.inf
    check(ops, "none", logits, EXPERTS)
    logits[2] = torch.nan
    x, weights = torch.ones(4, HIDDEN, device=DEVICE), make_weights("none", 2 * SIZE, HIDDEN, 1)
    gate_up = pack_experts(ops, weights)
    down = pack_experts(ops, make_weights("none", HIDDEN, SIZE, 2))
    out = ops.mix_experts(x, logits, gate_up, down, EXPERTS)
    assert out[[0, 1, 3]].isfinite().all()  # other rows are not touched
