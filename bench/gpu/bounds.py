"""The minimum time that a model needs on this GPU to read its bytes or to do its products."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from bench.gpu.ceilings import bandwidth, matmul_rate
from bench.gpu.heads import Heads
from bench.gpu.prompt_speed import attention_flops
from bench.gpu.records import Report
from bench.gpu.setup import Setup
from bench.workload import Shape, reference_workload
from tools.make_model import tensor_shapes


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
