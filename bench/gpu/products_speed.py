"""Measures the products of matrices: of the model in time, against the maximum of memory and tensor
cores, and with quantized weights in bytes per second, against the bandwidth."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import pytest
import torch

from bench.gpu.ceilings_speed import bandwidth, matmul_rate
from bench.gpu.records import Report
from bench.gpu.setup import Product, Setup, Sizes
from worker_svc.kernels.ops import PlainWeight
from worker_svc.kernels.triton.ops import pack
from worker_svc.kernels.triton.thin_matmul import MAX_ROWS, ThinWeight
from worker_svc.weights.quantization.formats import Format, QuantizedWeight


@pytest.mark.parametrize("product", Sizes().products, ids=lambda product: product.name)
def measure_product(setup: Setup, report: Report, product: Product) -> None:
    """Multiplies by one layer after another, so that no weight is in the cache."""
    sizes = setup.sizes
    if setup.rehearse:
        product = sizes.products[0]._replace(name=product.name)
    generator = setup.generator(product.name)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(*size, device=setup.device, generator=generator).to(setup.dtype)

    _, rows, columns = product
    size = rows * columns * setup.dtype.itemsize
    weights = [PlainWeight(random(rows, columns)) for _ in range(sizes.layers(size))]
    served = [pack(each.weight, setup.dtype) for each in weights]
    for tokens in sizes.product_tokens:
        x = random(tokens, columns)
        seconds = setup.timer.in_graph([partial(weight.matmul, x, None) for weight in served])
        moved = size + tokens * (rows + columns) * setup.dtype.itemsize
        by_bytes = moved / bandwidth(setup, report) / 1e9
        by_flops = 2 * tokens * rows * columns / matmul_rate(setup, report) / 1e12
        name = f"{product.name} {rows} x {columns}, {tokens} tokens"
        report.figure(name, 1e6 * seconds, "us", 1e6 * max(by_bytes, by_flops))
        if isinstance(served[0], ThinWeight) and tokens <= MAX_ROWS:
            cublas = setup.timer.in_graph([partial(weight.matmul, x, None) for weight in weights])
            report.figure(f"{name}, against cuBLAS", 1e6 * seconds, "us", 1e6 * cublas)


class Kind(NamedTuple):
    name: str
    format: Format
    group: int | None = None  # inputs that share a scale; None for all


KINDS = (
    Kind("int8", "int8"),
    Kind("int4, groups of 128", "int4", 128),
    Kind("fp8", "fp8"),
    Kind("fp8, blocks of 128", "fp8", 128),
)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def measure_quantized_product(setup: Setup, report: Report, kind: Kind) -> None:
    """Multiplies by one layer after another, so that no weight is in the cache. The bytes of codes,
    scales, x and results count once each. x is quantized if the product needs that."""
    sizes = setup.sizes
    generator = setup.generator(kind.name)
    for name, rows, columns in sizes.quantized_products:
        first = pack(random_weight(setup, kind, name, rows, columns), setup.dtype)
        size = sum(tensor.nbytes for tensor in (first.state() or {}).values())
        others = [
            pack(random_weight(setup, kind, name, rows, columns), setup.dtype)
            for _ in range(sizes.layers(size) - 1)
        ]
        for tokens in sizes.quantized_tokens:
            x = torch.randn(tokens, columns, device=setup.device, generator=generator)
            x = x.to(setup.dtype)
            runs = [partial(weight.matmul, x, None) for weight in (first, *others)]
            moved = size + tokens * (rows + columns) * setup.dtype.itemsize
            report.figure(
                f"{kind.name}: {name} {rows} x {columns}, {tokens} tokens",
                moved / setup.timer.in_graph(runs) / 1e9,
                "GB/s",
                bandwidth(setup, report),
            )


def random_weight(setup: Setup, kind: Kind, name: str, rows: int, columns: int) -> QuantizedWeight:
    generator = setup.generator(f"{kind.name} {name}")
    size = rows, columns // 2 if kind.format == "int4" else columns
    # These codes are finite as FP8, because their exponents are not all ones.
    codes = torch.randint(0, 112, size, dtype=torch.uint8, device=setup.device, generator=generator)
    if kind.format != "int4":
        codes = codes.view(torch.int8 if kind.format == "int8" else torch.float8_e4m3fn)
    groups = columns // (kind.group or columns)
    scales = torch.rand(rows, groups, device=setup.device, generator=generator)
    return QuantizedWeight(kind.format, codes, scales.to(setup.dtype).float())
