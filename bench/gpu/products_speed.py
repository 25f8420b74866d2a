"""Measures the products with plain and quantized weights in bytes per second, against the bandwidth
of the memory or the rate of the tensor cores."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch.nn import functional

from bench.gpu.ceilings_speed import bandwidth, matmul_rate
from bench.gpu.records import Report
from bench.gpu.setup import Setup
from worker_svc.kernels.triton.ops import pack
from worker_svc.kernels.triton.row_matmul import RowWeight
from worker_svc.kernels.triton.thin_matmul import MAX_ROWS
from worker_svc.weights.quantization.formats import Format, QuantizedWeight


class Kind(NamedTuple):
    name: str
    format: Format | None = None  # None: not quantized
    group: int | None = None  # inputs that share a scale; None for all


KINDS = (
    Kind("plain"),
    Kind("int8", "int8"),
    Kind("int4, groups of 128", "int4", 128),
    Kind("fp8", "fp8"),
    Kind("fp8, blocks of 128", "fp8", 128),
)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def measure_products(setup: Setup, report: Report, kind: Kind) -> None:
    """Multiplies by one layer after another, so that no weight is in the cache. The bytes of codes,
    scales, x and results count once each. x is quantized if the product needs that."""
    sizes = setup.sizes
    for name, rows, columns in sizes.products:
        generator = setup.generator(f"{kind.name} {name}")
        first = random_weight(setup, kind, rows, columns, generator)
        size = sum(tensor.nbytes for tensor in (pack(first, setup.dtype).state() or {}).values())
        others = range(sizes.layers(size) - 1)
        weights = [first, *(random_weight(setup, kind, rows, columns, generator) for _ in others)]
        packed = [pack(weight, setup.dtype) for weight in weights]
        for tokens in sizes.product_tokens:
            x = torch.randn(tokens, columns, device=setup.device, generator=generator)
            x = x.to(setup.dtype)
            case = f"{kind.name}: {name} {rows} x {columns}, {tokens} tokens"
            seconds = setup.timer.in_graph([partial(each.matmul, x, None) for each in packed])
            moved = size + tokens * (rows + columns) * setup.dtype.itemsize
            by_bytes = moved / bandwidth(setup, report) / 1e9
            by_flops = 2 * tokens * rows * columns / matmul_rate(setup, report) / 1e12
            report.figure(case, 1e6 * seconds, "us", 1e6 * max(by_bytes, by_flops))
            if isinstance(packed[0], RowWeight) and tokens <= MAX_ROWS:
                plain = [
                    partial(functional.linear, x, weight)
                    for weight in weights
                    if isinstance(weight, torch.Tensor)
                ]
                cublas = setup.timer.in_graph(plain)
                report.figure(f"{case}, against cuBLAS", 1e6 * seconds, "us", 1e6 * cublas)


def random_weight(
    setup: Setup, kind: Kind, rows: int, columns: int, generator: torch.Generator
) -> torch.Tensor | QuantizedWeight:
    if kind.format is None:
        weight = torch.randn(rows, columns, device=setup.device, generator=generator)
        return weight.to(setup.dtype)
    size = rows, columns // 2 if kind.format == "int4" else columns
    # These codes are finite as FP8, because their exponents are not all ones.
    codes = torch.randint(0, 112, size, dtype=torch.uint8, device=setup.device, generator=generator)
    if kind.format != "int4":
        codes = codes.view(torch.int8 if kind.format == "int8" else torch.float8_e4m3fn)
    groups = columns // (kind.group or columns)
    scales = torch.rand(rows, groups, device=setup.device, generator=generator)
    return QuantizedWeight(kind.format, codes, scales.to(setup.dtype).float())
