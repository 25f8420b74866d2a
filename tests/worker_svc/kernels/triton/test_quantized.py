"""Products with quantized weights against those with the numbers that their codes stand for."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.functional import ScalingType

from tests.worker_svc.device import DEVICE, ON_GPU, by_device, cpu_only, generator
from tests.worker_svc.kernels.triton.precision import (
    assert_identical,
    assert_rows_close,
    poisoned_memory,
    row_bound,
)
from tests.worker_svc.kernels.triton.weights import random_weight
from worker_svc.errors import ModelError
from worker_svc.kernels.ops import Exchange
from worker_svc.kernels.triton.ops import pack, unpack
from worker_svc.kernels.triton.quantized import weights
from worker_svc.kernels.triton.quantized.row_quantization import quantize
from worker_svc.kernels.triton.quantized.weights import CodeWeight, Fp8Weight, Int8Weight
from worker_svc.weights.quantization.formats import Format, QuantizedWeight, quantize_rows

DTYPE = by_device(cpu=torch.float32, gpu=torch.bfloat16)
# One row, a tile's and more, the largest tiles, each not full.
ROWS = by_device(cpu=[1, 17, 260], gpu=[1, 16, 17, 64, 200, 1000])


class Case(NamedTuple):
    """Sizes that are not multiples of a tile's; a weight that is split by columns, and groups of
    which a tile has a part, one or two."""

    format: Format
    out: int
    columns: int
    groups: int = 1
    zeros: bool = False


CASES = by_device(
    cpu=[
        Case("int8", 70, 520),
        Case("int8", 40, 96, groups=3, zeros=True),
        Case("int4", 70, 520),
        Case("int4", 40, 512, groups=4, zeros=True),
        Case("int4", 40, 96, groups=3),
        Case("fp8", 70, 520),
        Case("fp8", 40, 256, groups=2),
    ],
    gpu=[
        Case("int8", 4096, 1024),
        Case("int8", 1003, 3080),
        Case("int8", 1024, 3072, groups=24, zeros=True),
        Case("int4", 1024, 3072, groups=24),
        Case("int4", 6144, 4096, groups=32, zeros=True),
        Case("int4", 1003, 3104, groups=97),
        Case("fp8", 1024, 3072),
        Case("fp8", 6144, 4096, groups=32),
        Case("fp8", 1003, 3080),
    ],
)


def some_x(rows: int, columns: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    random = generator(rows)
    return torch.randn(rows, columns, generator=random, device=random.device).to(dtype)


def times(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return (x.double() @ weight.double().T + bias.double()).float()


def seen(x: torch.Tensor, packed: Any) -> torch.Tensor:
    """The numbers that x is multiplied as."""
    if isinstance(packed, Int8Weight):
        codes, scales = quantize_rows(x.float())
        return codes * scales[:, None]
    if isinstance(packed, Fp8Weight) and len(x) > weights.SPLIT_ROWS:
        groups = len(packed.scales)
        tiles = x.float().unflatten(1, (groups, -1))
        factors = 448 / tiles.abs().amax(2, keepdim=True)
        return ((tiles * factors).to(torch.float8_e4m3fn).float() / factors).flatten(1)
    return x.float()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_numbers(case: Case) -> None:
    """Every kind of weight, of its own and out of its state."""
    name, out, columns, groups, zeros = case
    weight = random_weight(name, out, columns, groups=groups, zeros=zeros)
    packed = pack(weight, DTYPE)
    bias = some_x(1, out)[0]
    numbers = weight.dequantized()
    for each, sizes in ((packed, ROWS), (unpack(packed.state()), ROWS[:1])):
        for rows in sizes:
            x = some_x(rows, columns)
            # cuBLAS rejects to be deterministic without a setting of its own.
            with nullcontext() if isinstance(each, Fp8Weight) else poisoned_memory():
                y = each.matmul(x, bias)
            assert y.dtype == DTYPE
            # Rounding x differently by one code is as much as rounding the result.
            assert_rows_close(y, times(seen(x, each), numbers, bias), 2 * row_bound(DTYPE))


def test_integer_products_do_not_depend_on_the_batch() -> None:
    """Bit for bit: a row alone, as one of few, whose columns are split, and in a crowd."""
    weight = pack(random_weight("int8", by_device(cpu=70, gpu=1024), 1024), DTYPE)
    assert isinstance(weight, Int8Weight)
    x = some_x(300, 1024)
    together = weight.matmul(x, None)
    for start, end in ((0, 1), (7, 8), (3, 20), (200, 270)):
        assert torch.equal(weight.matmul(x[start:end], None), together[start:end])


@pytest.mark.parametrize("name", ["int4", "int8", "fp8"])
def test_products_of_few_rows_do_not_depend_on_each_other(name: Format) -> None:
    """Bit for bit on a GPU; the interpreter multiplies with a library that adds up in any order."""
    columns = by_device(cpu=256, gpu=4096)
    weight = pack(random_weight(name, 1024 // 8, columns, groups=2), DTYPE)
    x = some_x(weights.SPLIT_ROWS, columns)
    together = weight.matmul(x, None)
    for start, end in ((0, 1), (3, 20)):
        alone = weight.matmul(x[start:end], None)
        if ON_GPU:
            assert torch.equal(alone, together[start:end])
        else:
            assert_rows_close(alone, together[start:end], 1e-6)


def test_ranks_agree_on_codes() -> None:
    """Each rank has half of the columns; the sums of both are those of one rank with all."""
    weight = random_weight("int8", 48, 256)
    x = some_x(5, 256, torch.float32)
    maxima = x.abs().amax(1)
    halves = (slice(0, 128), slice(128, 256))
    parts = [replace(weight, codes=weight.codes[:, half]) for half in halves]
    ys = [
        pack(part, torch.float32).matmul(
            x[:, half], None, Exchange(half.start, 256, lambda mine: maxima.maximum(mine))
        )
        for part, half in zip(parts, halves, strict=True)
    ]
    codes, scales = quantize_rows(x)
    numbers = (codes * scales[:, None]).double() @ weight.dequantized().double().T
    assert_rows_close(ys[0] + ys[1], numbers.float(), 1e-6)


@pytest.mark.parametrize("dtype", by_device(cpu=[torch.float32, torch.bfloat16], gpu=[DTYPE]))
@pytest.mark.parametrize("size", by_device(cpu=[200], gpu=[1024, 3072, 25600, 1003]))
def test_rows_are_quantized_as_the_format_says(size: int, dtype: torch.dtype) -> None:
    """Rows of zeros, of numbers of very different sizes, and strided ones."""
    x = some_x(6, 2 * size, dtype)[:, :size]
    x[1] = 0
    x[2] *= torch.logspace(-6, 4, size, device=DEVICE)
    for maxima in (None, 1.7 * x.float().abs().amax(1)):
        codes, scales = quantize(x, torch.int8, maxima=maxima)
        # On the CPU: a GPU's torch divides in another way.
        expected = quantize_rows(x.float().cpu(), None if maxima is None else maxima.cpu())
        assert_identical(codes.cpu(), expected[0])
        assert_identical(scales[:, 0].cpu(), expected[1])


@pytest.mark.parametrize("group", [None, 128])
def test_rows_in_fp8(group: int | None) -> None:
    """They round to fp8 as torch does: ties, subnormal numbers, and the largest."""
    x = some_x(7, 384, torch.float32)
    x *= torch.logspace(-7, 3, 384, device=DEVICE)
    x[1] = 0
    x[2, :128] = torch.arange(128, device=DEVICE) * 3.5  # the largest, 444.5, and many ties
    codes, scales = quantize(x, torch.float8_e4m3fn, group=group, multiple=4)
    assert len(codes) == 8
    tiles = x.cpu().unflatten(1, (-1, group or 384))
    maxima = tiles.abs().amax(2)
    factors = torch.where(maxima > 0, 448 / maxima, 0)
    expected = (tiles * factors[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn).flatten(1)
    assert_identical(codes[:7].cpu().view(torch.uint8), expected.view(torch.uint8))
    assert_identical(scales[:7].cpu(), maxima / 448)
    assert scales.shape[1] == 1 or scales.stride() == (1, 8)


@cpu_only
@pytest.mark.parametrize("groups", [1, 2])
def test_fp8_products_of_many_rows_are_torchs(groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a scale per row, torch's own on the CPU; per block, a stand-in with the shapes and
    strides that torch checks on a GPU."""
    calls = []

    def scaled_mm(
        a: Any, b: Any, a_scales: Any, a_kind: Any, b_scales: Any, b_kind: Any, **kw: Any
    ):
        calls.append(a_kind)
        assert a_kind == b_kind
        if a_kind == ScalingType.RowWise:
            return torch.nn.functional.scaled_mm(a, b, a_scales, a_kind, b_scales, b_kind, **kw)
        (m, k), n = a.shape, b.shape[1]
        assert m % 4 == 0
        assert (a_scales.shape, a_scales.stride()) == ((m, k // 128), (1, m))
        assert (b_scales.shape, b_scales.stride()) == ((n, k // 128), (1, n))
        left = a.float() * a_scales.repeat_interleave(128, 1)
        return (left @ (b.float().T * b_scales.repeat_interleave(128, 1)).T).to(kw["output_dtype"])

    monkeypatch.setattr(weights, "_scales_products", lambda *_: True)
    monkeypatch.setattr(weights, "scaled_mm", scaled_mm)
    weight = random_weight("fp8", 48, 256, groups=groups)
    packed = pack(weight, torch.bfloat16)
    assert isinstance(packed, Fp8Weight)
    assert isinstance(unpack(packed.state()), Fp8Weight)
    bias = some_x(1, 48, torch.bfloat16)[0]
    x = some_x(70, 256, torch.bfloat16)
    y = packed.matmul(x, bias, exchange=Exchange(0, x.shape[1], lambda mine: mine))
    assert calls == [ScalingType.RowWise if groups == 1 else ScalingType.BlockWise1x128]
    exact = times(seen(x, packed), weight.dequantized(), bias)
    assert_rows_close(y, exact, 2 * row_bound(torch.bfloat16))
    few = packed.matmul(x[:3], bias)
    assert len(calls) == 1
    assert_rows_close(few, times(x[:3], weight.dequantized(), bias), row_bound(torch.bfloat16))


def test_groups_that_do_not_fit_are_rejected() -> None:
    for name in ("int4", "int8"):
        weight = random_weight(name, 8, 80, groups=2)
        with pytest.raises(ModelError, match=f"{name} in groups of 40 is not served on cuda"):
            pack(weight, DTYPE)


def test_scales_are_kept_in_16_bits_if_they_lose_nothing() -> None:
    weight = random_weight("int4", 8, 64, groups=2)
    for scales, dtype in (
        (weight.scales.half().float(), torch.float16),
        (weight.scales.bfloat16().float() * 2**-20, torch.bfloat16),
        (weight.scales, torch.float32),
    ):
        packed = pack(QuantizedWeight("int4", weight.codes, scales), DTYPE)
        assert isinstance(packed, CodeWeight)
        assert packed.scales.dtype == dtype
        assert torch.equal(packed.scales.float(), scales.T)
