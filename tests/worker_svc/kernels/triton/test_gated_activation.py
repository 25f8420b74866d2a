from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.worker_svc.activations import ACTIVATIONS
from tests.worker_svc.device import DEVICE, TOKENS, WIDTHS, by_device
from tests.worker_svc.kernels.triton.precision import DTYPES, assert_rounded_once, poisoned_memory
from worker_svc.kernels.ops import Activation
from worker_svc.kernels.triton.gated_activation import activate_and_multiply


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("tokens", by_device(cpu=[5], gpu=TOKENS))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", by_device(cpu=[8, 100, 1024, 1025, 3072], gpu=WIDTHS))
def test_activate_and_multiply(
    size: int, dtype: torch.dtype, tokens: int, activation: Activation
) -> None:
    """Even where the activation is next to nothing, and for strided rows."""
    generator = torch.Generator().manual_seed(size)
    padded = torch.full((tokens, 2 * size + 8), torch.nan, dtype=dtype)
    padded[:, : 2 * size] = 5 * torch.randn(tokens, 2 * size, generator=generator)
    padded[0, :4] = torch.tensor([-100.0, -20.0, 0.0, 100.0])
    gate_up = padded.to(DEVICE)[:, : 2 * size]
    with poisoned_memory(), np.errstate(over="ignore"):  # of the interpreter's e to the 100
        out = activate_and_multiply(gate_up, activation)
    assert out.dtype == dtype
    gate, up = gate_up.double().chunk(2, dim=1)
    assert_rounded_once(out, (ACTIVATIONS[activation](gate) * up).float())
