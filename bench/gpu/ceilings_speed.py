"""Measures the maximum rates of this GPU's memory and tensor cores, and works out the minimum time
that a model needs to read its bytes or to do its products."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl

from bench.gpu.records import Report
from bench.gpu.setup import Setup
from bench.gpu.steps import Heads
from bench.workload import Shape, reference_workload
from tools.make_model import tensor_shapes

BANDWIDTH = "bandwidth"
MATMUL = "matrix product"
STRETCH, TILE = 2**14, 4096  # numbers that a program reads in all and at a time


def bandwidth(setup: Setup, report: Report) -> float:
    """GB/s of a kernel that reads random bytes; measured once per run. Copies are slower."""
    rate = report.value(BANDWIDTH)
    if rate is None:
        size = setup.sizes.read_bytes
        generator = setup.generator("bytes")
        source = torch.randint(
            -(2**31),
            2**31,
            (size // 4,),
            generator=generator,
            device=setup.device,
            dtype=torch.int32,
        )
        stretch = min(STRETCH, source.numel())
        maxima = torch.empty(source.numel() // stretch, dtype=torch.int32, device=setup.device)
        constants = {"STRETCH": stretch, "TILE": min(TILE, stretch), "num_warps": 8}
        seconds = setup.timer.in_graph(
            [partial(_read[(len(maxima),)], source, maxima, **constants)]
        )
        assert torch.equal(maxima, source.view(-1, stretch).amax(1))  # the kernel read everything
        rate = 1e-9 * size / seconds
        report.figure(BANDWIDTH, rate, "GB/s")
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


@triton.jit  # type: ignore[untyped-decorator]
def _read(source: tl.tensor, maxima: tl.tensor, STRETCH: tl.constexpr, TILE: tl.constexpr) -> None:
    """Reduces each stretch of int32 to its maximum."""
    start = tl.program_id(0).to(tl.int64) * STRETCH
    top = tl.full([TILE], -2147483648, tl.int32)
    for offset in range(0, STRETCH, TILE):
        top = tl.maximum(top, tl.load(source + start + offset + tl.arange(0, TILE)))
    tl.store(maxima + tl.program_id(0), tl.max(top))


def measure_bandwidth(setup: Setup, report: Report) -> None:
    bandwidth(setup, report)


def measure_matrix_product(setup: Setup, report: Report) -> None:
    matmul_rate(setup, report)


def attention_flops(heads: Heads, queries: int, context: int) -> float:
    """Operations for a sequence's last `queries` positions. Each position sees all positions up to
    itself."""
    seen = queries * (context - queries) + queries * (queries + 1) / 2
    return 4 * heads.heads * heads.head_dim * seen


@dataclass(frozen=True)
class ModelSize:
    layers: int
    heads: Heads
    body: int  # number of weights in the layers
    head: int  # number of weights of the logits
    itemsize: int

    @property
    def weight_bytes(self) -> int:
        return (self.body + self.head) * self.itemsize

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's keys and values."""
        return 2 * self.layers * self.heads.kv_heads * self.heads.head_dim * self.itemsize

    def flops(self, queries: Sequence[int], contexts: Sequence[int]) -> float:
        """Floating-point operations of a step in which each sequence samples."""
        found = 2.0 * (self.body * sum(queries) + self.head * len(queries))
        attended = map(attention_flops, [self.heads] * len(queries), queries, contexts)
        return found + self.layers * sum(attended)


def model_size(setup: Setup) -> ModelSize:
    config = json.loads((setup.model / "config.json").read_text())
    shapes = tensor_shapes(config)
    head = math.prod(shapes.pop("model.embed_tokens.weight"))
    shapes.pop("lm_head.weight", None)  # as large as the embedding
    heads = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    return ModelSize(
        config["num_hidden_layers"],
        Heads(*heads),
        sum(map(math.prod, shapes.values())),
        head,
        setup.dtype.itemsize,
    )


def workload_bound(setup: Setup, report: Report) -> float:
    """The maximum output tokens/s of the reference workload at the measured rates."""
    rates = bandwidth(setup, report), matmul_rate(setup, report)
    return bound(model_size(setup), setup.sizes.workload, *rates)


def bound(size: ModelSize, shape: Shape, gb_per_s: float, tflops: float) -> float:
    """The maximum output tokens/s, if decodes only read and prompts only multiply.

    Each output token reads the keys and values of its context. The decodes of the longest request
    read the weights.
    """
    requests = reference_workload(shape, 1)
    prompts = [len(request.prompt) for request in requests]
    outputs = [request.output_len for request in requests]
    reads = sum(n * p + n * (n + 1) // 2 for p, n in zip(prompts, outputs, strict=True))
    moved = reads * size.token_bytes + max(outputs) * size.weight_bytes
    seconds = moved / gb_per_s / 1e9 + size.flops(prompts, prompts) / tflops / 1e12
    return sum(outputs) / seconds
