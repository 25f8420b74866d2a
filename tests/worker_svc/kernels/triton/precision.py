"""Bounds on a result's distance from float32, and memory that shows where nothing was written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tests.worker_svc.device import by_device

DTYPES = by_device(
    cpu=(torch.bfloat16, torch.float16, torch.float32), gpu=(torch.bfloat16, torch.float16)
)
# The error of rounding once, relative to the value: half of the last place, but all of it for
# bfloat16, which Triton's interpreter truncates to. (A GPU rounds.)
ROUNDING = {
    torch.bfloat16: by_device(cpu=2**-7, gpu=2**-8),
    torch.float16: 2**-11,
    torch.float32: 2**-24,
}
# Relative to the largest of a row: a GPU's functions approximate, and terms of opposite sign leave
# that of the error.
_APPROXIMATION = by_device(cpu=0.0, gpu=3e-6)


def relative_error(actual: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest ‖actual − exact‖ / ‖exact‖ of any row (the last dimension), so that one wrong row
    among thousands shows. NaN if any is; rows that are 0 must be exactly that."""
    difference = (actual.float() - exact).norm(dim=-1)
    return float(torch.where(difference == 0, 0.0, difference / exact.norm(dim=-1)).max())


def row_bound(dtype: torch.dtype) -> float:
    """The `relative_error` of rounding once, or of arithmetic in float32."""
    return max(ROUNDING[dtype], 1e-5)


def assert_rows_close(actual: torch.Tensor, exact: torch.Tensor, bound: float) -> None:
    error = relative_error(actual, exact)
    assert error <= bound, f"the relative error of a row is {error:.2g}, its bound {bound:.2g}"


def assert_rounded_once(actual: torch.Tensor, exact: torch.Tensor) -> None:
    """Compares with `exact`, computed in float32 from the same inputs."""
    assert exact.dtype == torch.float32
    assert_rows_close(actual, exact, row_bound(actual.dtype))
    slack = 1e-6 + _APPROXIMATION * exact.abs().amax(dim=-1, keepdim=True)
    allowed = (ROUNDING[actual.dtype] + 4e-6) * exact.abs() + slack
    excess = float(((actual.float() - exact).abs() / allowed).max())
    assert excess <= 1, f"an element has {excess:.2g} times the error of rounding once"


def assert_identical(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Counts NaN as equal to itself."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fills what `torch.empty` returns with NaN, and with the largest integer. On a GPU only
    for launches of kernels: some of torch's own operations then refuse to run."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
