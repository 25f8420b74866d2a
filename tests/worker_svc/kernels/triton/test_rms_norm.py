from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.worker_svc.device import DEVICE, TOKENS, WIDTHS, by_device
from tests.worker_svc.kernels.triton.precision import DTYPES, assert_rounded_once, poisoned_memory
from worker_svc.kernels.triton.rms_norm import add_rms_norm, rms_norm

SIZES = by_device(cpu=[64, 100, 1024, 2560, 8192], gpu=WIDTHS)
EPS = 1e-3  # large enough to show

rows = pytest.mark.parametrize("tokens", by_device(cpu=[5], gpu=TOKENS))


def random(tokens: int, size: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Strided rows of unlike magnitude, NaN between them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.full((tokens, size + 16), torch.nan, dtype=dtype)
    scale = torch.logspace(-2, 1, tokens).unsqueeze(1)
    x[:, :size] = torch.randn(tokens, size, generator=generator) * scale
    return x.to(DEVICE)[:, :size]


@rows
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_norm(size: int, dtype: torch.dtype, tokens: int) -> None:
    x, weight = random(tokens, size, dtype, seed=0), random(1, size, dtype, seed=1)[0]
    with poisoned_memory():
        out = rms_norm(x, weight, EPS)
    assert out.dtype == dtype
    assert_rounded_once(out, F.rms_norm(x.float(), (size,), weight.float(), EPS))


@rows
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_add_and_norm(size: int, dtype: torch.dtype, tokens: int) -> None:
    """The norm is of the sum before it was rounded, and nothing beside the rows is written."""
    x, residual, weight = (random(tokens, size, dtype, seed) for seed in range(3))
    weight = weight[-1]
    exact = x.float() + residual.float()
    expected = F.rms_norm(exact, (size,), weight.float(), EPS)
    with poisoned_memory():
        out = add_rms_norm(x, residual, weight, EPS)
    assert out.dtype == dtype
    assert_rounded_once(out, expected)
    assert_rounded_once(residual, exact)
    assert residual.as_strided((tokens, 16), (size + 16, 1), size).isnan().all()
