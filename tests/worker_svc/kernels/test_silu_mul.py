from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.worker_svc.kernels.precision import DTYPES, assert_rounded_once, poisoned_memory
from worker_svc.kernels import silu_mul as module
from worker_svc.kernels.silu_mul import silu_and_multiply, silu_and_multiply_reference


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [8, 100, 1024, 1025, 3072])
def test_silu_and_multiply(size: int, dtype: torch.dtype) -> None:
    """Also where silu is next to nothing, and of rows that lie apart in memory."""
    generator = torch.Generator().manual_seed(size)
    padded = torch.full((5, 2 * size + 8), torch.nan, dtype=dtype)
    gate_up = padded[:, : 2 * size]
    gate_up[:] = 5 * torch.randn(5, 2 * size, generator=generator)
    gate_up[0, :4] = torch.tensor([-100.0, -20.0, 0.0, 100.0])
    with poisoned_memory(), np.errstate(over="ignore"):  # of the interpreter's e to the 100
        out = silu_and_multiply(gate_up)
    assert out.dtype == dtype
    assert_rounded_once(out, silu_and_multiply_reference(gate_up.float()))


def test_the_gate_comes_first() -> None:
    expected = [[2 / (1 + 2.718281828**-1), 0.0]]
    for silu in (silu_and_multiply, silu_and_multiply_reference):
        torch.testing.assert_close(silu(torch.tensor([[1.0, 0, 2, 3]])), torch.tensor(expected))


def test_no_tokens_launch_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_silu_and_multiply_kernel", None)
    assert silu_and_multiply(torch.empty(0, 16)).shape == (0, 8)
