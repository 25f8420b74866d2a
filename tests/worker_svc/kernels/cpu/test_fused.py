from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from worker_svc.kernels.cpu.fused import PARALLEL_TOKENS, add_rms_norm

from tests.worker_svc.kernels.triton.precision import poisoned_memory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [0, 1, PARALLEL_TOKENS + 3])
@pytest.mark.parametrize("size", [24, 100, 1024])
def test_add_rms_norm(size: int, tokens: int, dtype: torch.dtype) -> None:
    """With weights of any dtype, and an epsilon large enough to show."""
    generator = torch.Generator().manual_seed(size)
    x, residual = torch.randn(2, tokens, size, generator=generator)
    weight = torch.randn(size, generator=generator).to(dtype)
    total = x + residual
    expected = F.rms_norm(total, (size,), weight.float(), 1e-2)
    with poisoned_memory():
        out = add_rms_norm(x, residual, weight, 1e-2)
    assert torch.equal(residual, total)
    torch.testing.assert_close(out, expected, rtol=4e-6, atol=1e-6)
