"""The maximum rates of this GPU's memory and tensor cores, with which other rates are compared."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import triton
import triton.language as tl

from bench.gpu.records import Report
from bench.gpu.setup import Setup

BANDWIDTH = "bandwidth"
MATMUL = "matrix product"
# The count of numbers that a program reads, the count that it reads at a time, and its warps.
READS = ((2**14, 4096, 8), (2**15, 8192, 8), (2**16, 4096, 4))


def bandwidth(setup: Setup, report: Report) -> float:
    """GB/s of the fastest of several ways to move random bytes; measured once per run."""
    rate = report.value(BANDWIDTH)
    if rate is None:
        ways = dict(_ways(setup))
        report.detail("ways to move bytes, GB/s", ways)
        best = max(ways, key=lambda way: ways[way])
        rate = ways[best]
        report.figure(BANDWIDTH, rate, "GB/s")
        report.note(best)
    return float(rate)


def matmul_rate(setup: Setup, report: Report) -> float:
    """TFLOP/s of a product of square random matrices; measured once per run."""
    rate = report.value(MATMUL)
    if rate is None:
        size = setup.sizes.matmul
        generator = setup.generator("matmul")
        a, b = (
            torch.randn(size, size, device=setup.device, generator=generator).to(setup.dtype)
            for _ in range(2)
        )
        out = torch.empty_like(a)
        seconds = setup.timer.in_graph([lambda: torch.mm(a, b.T, out=out)])
        rate = 2 * size**3 / seconds / 1e12
        report.figure(MATMUL, rate, "TFLOP/s")
    return float(rate)


def _ways(setup: Setup) -> Iterator[tuple[str, float]]:
    size, timer = setup.sizes.copied_bytes, setup.timer
    generator = setup.generator("bytes")
    source = torch.randint(
        -(2**31), 2**31, (size // 4,), generator=generator, device=setup.device, dtype=torch.int32
    )
    target = torch.empty_like(source)
    yield "copy, in a graph", 2e-9 * size / timer.in_graph([lambda: target.copy_(source)])
    yield "copy, on the stream", 2e-9 * size / timer.eager(lambda: target.copy_(source))
    assert torch.equal(source, target)
    for stretch, tile, warps in READS:
        stretch = min(stretch, source.numel())
        maxima = torch.empty(source.numel() // stretch, dtype=torch.int32, device=setup.device)

        constants = {"STRETCH": stretch, "TILE": min(tile, stretch), "num_warps": warps}
        seconds = timer.in_graph([partial(_read[(len(maxima),)], source, maxima, **constants)])
        assert torch.equal(maxima, source.view(-1, stretch).amax(1))  # the kernel read everything
        yield f"read, {stretch} x 4 bytes a program", 1e-9 * size / seconds


@triton.jit  # type: ignore[untyped-decorator]
def _read(source: tl.tensor, maxima: tl.tensor, STRETCH: tl.constexpr, TILE: tl.constexpr) -> None:
    """Reduces each stretch of int32 to its maximum."""
    start = tl.program_id(0).to(tl.int64) * STRETCH
    top = tl.full([TILE], -2147483648, tl.int32)
    for offset in range(0, STRETCH, TILE):
        top = tl.maximum(top, tl.load(source + start + offset + tl.arange(0, TILE)))
    tl.store(maxima + tl.program_id(0), tl.max(top))
