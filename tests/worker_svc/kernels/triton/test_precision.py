from __future__ import annotations

import math

import pytest
import torch

from tests.worker_svc.device import cpu_only
from tests.worker_svc.kernels.triton.precision import assert_rounded_once, relative_error

pytestmark = [pytest.mark.launches_nothing, cpu_only]


def test_relative_error_is_that_of_the_worst_row() -> None:
    exact = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    assert relative_error(exact.half(), exact) == 0
    assert relative_error(torch.tensor([[3.0, 4.5], [0.0, 0.0]]), exact) == pytest.approx(0.1)
    assert relative_error(torch.tensor([[3.0, 4.0], [0.0, 1e-9]]), exact) == math.inf
    assert math.isnan(relative_error(torch.tensor([[3.0, math.nan], [0.0, 0.0]]), exact))


@pytest.mark.parametrize("wrong", [math.nan, 1.02, 0.0, -1.0])
def test_one_wrong_element_shows(wrong: float) -> None:
    exact = torch.ones(3, 1000)
    actual = exact.bfloat16()
    assert_rounded_once(actual, exact)
    actual[1, 500] = wrong
    with pytest.raises(AssertionError):
        assert_rounded_once(actual, exact)
