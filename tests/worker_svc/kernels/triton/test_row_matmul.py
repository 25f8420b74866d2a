from __future__ import annotations

import pytest
import torch

from tests.worker_svc.device import DEVICE, by_device
from tests.worker_svc.kernels.triton.precision import assert_rows_close, poisoned_memory, row_bound
from tests.worker_svc.kernels.triton.test_thin_matmul import DTYPES, random
from worker_svc.kernels.ops import PlainWeight
from worker_svc.kernels.triton import row_matmul as module
from worker_svc.kernels.triton.ops import pack, unpack
from worker_svc.kernels.triton.row_matmul import RowWeight
from worker_svc.kernels.triton.thin_matmul import ThinWeight

SIZES = by_device(
    cpu=[(8, 2048), (64, 1024), (72, 1536)],
    gpu=[(1024, 2048), (1024, 3072), (2048, 1024), (4096, 1024), (6144, 1024)],
)


@pytest.fixture(autouse=True)
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE.type == "cpu":
        monkeypatch.setattr(module, "FEW_ROWS", 64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("outs", "columns"), SIZES)
def test_equals_the_exact_product(outs: int, columns: int, dtype: torch.dtype) -> None:
    matrix, x = random(outs, columns, dtype=dtype), random(1, columns, dtype=dtype)
    assert RowWeight.suits(matrix)
    with poisoned_memory():
        out = RowWeight(matrix).matmul(x, None)
    assert out.dtype == dtype
    assert_rows_close(out, (x.double() @ matrix.double().T).float(), row_bound(dtype))


def test_other_products_are_left_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """More rows, a bias, sizes that are not multiples of a tile's, and large weights."""
    matrix = random(72, 1536, dtype=torch.bfloat16)
    x, bias = random(2, 1536, dtype=torch.bfloat16), torch.ones(72, device=DEVICE)
    exact, bound = x.float() @ matrix.float().T, 2 * row_bound(torch.bfloat16)
    assert_rows_close(RowWeight(matrix).matmul(x, None), exact, bound)
    assert_rows_close(RowWeight(matrix).matmul(x[:1], bias), exact[:1] + 1, bound)
    assert not RowWeight.suits(random(70, 1536, dtype=torch.bfloat16))
    assert not RowWeight.suits(random(72, 1537, dtype=torch.bfloat16))
    assert not RowWeight.suits(random(72, 1536, dtype=torch.float32))
    monkeypatch.setattr(module, "MAX_SIZE", 72 * 1536 - 1)
    assert not RowWeight.suits(matrix)


def test_which_weights_multiply_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thin ones, too, if they suit; kept weights as before."""

    def packed(outs: int, columns: int) -> PlainWeight:
        weight = pack(random(outs, columns, dtype=torch.bfloat16), torch.bfloat16)
        assert isinstance(weight, PlainWeight)
        assert type(unpack(weight.state())) is type(weight)
        return weight

    calls: list[int] = []
    monkeypatch.setattr(module, "row_matmul", lambda x, weight: calls.append(len(weight)))
    for outs, columns, kind in (
        (64, 1024, ThinWeight),
        (64, 128, ThinWeight),
        (68, 1024, PlainWeight),
        (72, 1536, RowWeight),
    ):
        weight = packed(outs, columns)
        assert type(weight) is kind
        weight.matmul(random(1, columns, dtype=torch.bfloat16), None)
    assert calls == [64, 72]
