"""Measures the model's matrix products, against the maximum of memory and tensor cores, and
`thin_matmul` against cuBLAS, too."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from bench.gpu.ceilings import bandwidth, matmul_rate
from bench.gpu.records import Report
from bench.gpu.setup import Product, Setup, Sizes
from worker_svc.kernels.ops import PlainWeight
from worker_svc.kernels.triton.ops import pack
from worker_svc.kernels.triton.thin_matmul import MAX_ROWS, ThinWeight


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
