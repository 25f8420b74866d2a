from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.worker_svc.device import DEVICE, TOKENS, WIDTHS, by_device
from tests.worker_svc.kernels.triton.precision import DTYPES, assert_rounded_once, poisoned_memory
from worker_svc.kernels.triton.rms_norm import rms_norm

SIZES = by_device(cpu=[64, 100, 1024, 2560, 8192], gpu=WIDTHS)
EPS = 1e-3  # large enough to show


def random(tokens: int, size: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Strided rows of unlike magnitude, NaN between them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.full((tokens, size + 16), torch.nan, dtype=dtype)
    scale = torch.logspace(-2, 1, tokens).unsqueeze(1)
    x[:, :size] = torch.randn(tokens, size, generator=generator) * scale
    return x.to(DEVICE)[:, :size]


@pytest.mark.parametrize("tokens", by_device(cpu=[5], gpu=TOKENS))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_norms(size: int, dtype: torch.dtype, tokens: int) -> None:
    """The norm of a sum is that before it was rounded, and nothing beside the rows is written."""
    x, residual, weights = (random(tokens, size, dtype, seed) for seed in range(3))
    weight, total = weights[-1], x.float() + residual.float()
    with poisoned_memory():
        outs = rms_norm(x, None, weight, EPS), rms_norm(x, residual, weight, EPS)
    for out, exact in zip(outs, (x.float(), total), strict=True):
        assert out.dtype == dtype
        assert_rounded_once(out, F.rms_norm(exact, (size,), weight.float(), EPS))
    assert_rounded_once(residual, total)
    assert residual.as_strided((tokens, 16), (size + 16, 1), size).isnan().all()
