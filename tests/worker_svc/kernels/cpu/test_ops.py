from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.worker_svc.activations import ACTIVATIONS
from tests.worker_svc.kernels.cpu import eager_ops as cpu_ops
from tests.worker_svc.kernels.triton.precision import poisoned_memory
from worker_svc.kernels.ops import Activation
from worker_svc.kernels.triton import ops as triton_ops

EPS = 1e-2  # large enough to show
rows = pytest.mark.parametrize("tokens", [0, 1, 67])
BOUNDS = {"rtol": 4e-6, "atol": 1e-6}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@rows
@pytest.mark.parametrize("size", [24, 100, 1024])
def test_norms(size: int, tokens: int, dtype: torch.dtype) -> None:
    """With weights of any dtype."""
    generator = torch.Generator().manual_seed(size)
    x, residual = torch.randn(2, tokens, size, generator=generator)
    weight = torch.randn(size, generator=generator).to(dtype)
    total = x + residual
    with poisoned_memory():
        out = cpu_ops.rms_norm(x, None, weight, EPS)
        out_of_sum = cpu_ops.rms_norm(x, residual, weight, EPS)
    torch.testing.assert_close(out, F.rms_norm(x, (size,), weight.float(), EPS), **BOUNDS)
    assert torch.equal(residual, total)
    torch.testing.assert_close(
        out_of_sum, F.rms_norm(total, (size,), weight.float(), EPS), **BOUNDS
    )


@rows
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("size", [8, 100, 1024])
def test_activate_and_multiply(size: int, tokens: int, activation: Activation) -> None:
    """Even where the activation is next to nothing."""
    generator = torch.Generator().manual_seed(size)
    gate_up = 5 * torch.randn(tokens, 2 * size, generator=generator)
    gate_up[:1, :4] = torch.tensor([-100.0, -20.0, 0.0, 100.0])
    with poisoned_memory():
        out = cpu_ops.activate_and_multiply(gate_up, activation)
    gate, up = gate_up.double().chunk(2, dim=1)
    torch.testing.assert_close(out, (ACTIVATIONS[activation](gate) * up).float(), **BOUNDS)


@rows
@pytest.mark.parametrize("ops", [cpu_ops, triton_ops])
@pytest.mark.parametrize("sizes", [(8, 3), (40, 20), (64, 128)])
def test_norms_of_two_parts(ops: Any, sizes: tuple[int, int], tokens: int) -> None:
    """One rank's half of them, by the sums of squares of both ranks."""
    generator = torch.Generator().manual_seed(sizes[0])
    x = torch.randn(tokens, sum(sizes) + 5, generator=generator)
    other = torch.randn(tokens, sum(sizes), generator=generator)
    weight = torch.rand(sum(sizes), generator=generator) + 0.5
    expected = x.clone()
    both = zip(expected[:, :-5].split(sizes, 1), other.split(sizes, 1), strict=True)
    for (part, more), own in zip(both, weight.split(sizes), strict=True):
        mean_square = torch.cat((part, more), 1).square().mean(1, keepdim=True)
        part.mul_((mean_square + EPS).rsqrt() * own)
    with poisoned_memory():
        squares = ops.sum_squares(x, sizes) + ops.sum_squares(other, sizes)
        out = ops.scale_parts(x, squares, weight, sizes, (2 * sizes[0], 2 * sizes[1]), EPS)
    assert out is x
    torch.testing.assert_close(out, expected, **BOUNDS)


@pytest.mark.parametrize("tokens", [1, 67])
@pytest.mark.parametrize("ops", [cpu_ops, triton_ops])
def test_a_sum_without_a_norm(ops: Any, tokens: int) -> None:
    x, residual = torch.randn(2, tokens, 24)
    total = x + residual
    out = ops.rms_norm(x, residual, None, 0.0)
    assert torch.equal(out, total)
    assert torch.equal(residual, total)
    assert out.data_ptr() != residual.data_ptr()
