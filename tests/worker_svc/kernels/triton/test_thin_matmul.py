from __future__ import annotations

import pytest
import torch

from tests.worker_svc.device import DEVICE, by_device, generator
from tests.worker_svc.kernels.triton.precision import (
    assert_identical,
    assert_rows_close,
    poisoned_memory,
    row_bound,
)
from worker_svc.kernels.triton.ops import pack, unpack
from worker_svc.kernels.triton.thin_matmul import MAX_ROWS, ThinWeight, choose_splits

# Outputs and columns: split into 8, 4, 2 and 1 parts.
SIZES = by_device(
    cpu=[(64, 1024), (32, 512), (32, 256), (64, 384)],
    gpu=[(512, 4096), (1024, 2048), (1024, 3072), (2048, 2048), (2048, 5504), (1024, 128)],
)
DTYPES = (torch.bfloat16, torch.float16)


def random(*size: int, dtype: torch.dtype) -> torch.Tensor:
    numbers = generator(size[0])
    return torch.randn(*size, generator=numbers, device=numbers.device).to(dtype)


@pytest.mark.parametrize("rows", by_device(cpu=[1, 17], gpu=[1, 16, 17, 33, MAX_ROWS]))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("outs", "columns"), SIZES)
def test_equals_the_exact_product(outs: int, columns: int, dtype: torch.dtype, rows: int) -> None:
    matrix, x = random(outs, columns, dtype=dtype), random(rows, columns, dtype=dtype)
    assert ThinWeight.suits(matrix)
    weight = ThinWeight(matrix)
    with poisoned_memory():
        out = weight.matmul(x, None)
    assert out.dtype == dtype
    assert_rows_close(out, (x.double() @ matrix.double().T).float(), row_bound(dtype))
    # The parts are added up in order, and the first product left nothing behind.
    assert_identical(weight.matmul(x, None), out)


def test_a_cached_weight_is_multiplied_the_same_way() -> None:
    weight = pack(random(32, 256, dtype=torch.bfloat16), torch.bfloat16)
    assert isinstance(weight, ThinWeight)
    assert isinstance(unpack(weight.state()), ThinWeight)


def test_sizes_are_split_into_equal_parts() -> None:
    splits = {choose_splits(outs, columns) for outs, columns in SIZES}
    assert splits >= {1, 2, 4, 8}
    assert all(columns // 128 % choose_splits(outs, columns) == 0 for outs, columns in SIZES)


def test_other_products_are_left_to_cublas() -> None:
    """More rows, a bias, and sizes that are not multiples of a tile's."""
    matrix = random(32, 256, dtype=torch.bfloat16)
    x, bias = random(MAX_ROWS + 1, 256, dtype=torch.bfloat16), torch.ones(32, device=DEVICE)
    exact = x.float() @ matrix.float().T
    bound = 2 * row_bound(torch.bfloat16)
    assert_rows_close(ThinWeight(matrix).matmul(x, None), exact, bound)
    assert_rows_close(ThinWeight(matrix).matmul(x[:2], bias), exact[:2] + 1, bound)
    assert not ThinWeight.suits(random(33, 256, dtype=torch.bfloat16))
    assert not ThinWeight.suits(random(32, 250, dtype=torch.bfloat16))
    assert not ThinWeight.suits(random(32 * 65, 256, dtype=torch.bfloat16))
