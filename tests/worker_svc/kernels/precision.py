"""How far a result may be from float32, and memory that shows where nothing was written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# The error of rounding once, relative to the value: half of the last place, but all of it for
# bfloat16, which Triton's interpreter truncates to. (A GPU rounds.)
ROUNDING = {torch.bfloat16: 2**-7, torch.float16: 2**-11, torch.float32: 2**-24}


def assert_rounded_once(actual: torch.Tensor, exact: torch.Tensor) -> None:
    """exact: of the same inputs in float32."""
    assert exact.dtype == torch.float32
    rtol = ROUNDING[actual.dtype] + 4e-6
    torch.testing.assert_close(actual.float(), exact, rtol=rtol, atol=1e-6)


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """What `torch.empty` returns is filled with NaN, and with the largest integer."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
