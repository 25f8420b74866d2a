"""The contents of caches in 8 bits. gpu_path/test_backends tests attention over them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bench.gpu.steps import QWEN_0_6B, Heads
from tests.worker_svc.device import DEVICE, by_device
from tests.worker_svc.kernels.triton import test_rope_store as storing
from tests.worker_svc.kernels.triton.attention_cases import assert_close
from tests.worker_svc.kernels.triton.caches import dequantized, rope_store_reference
from worker_svc.attention.base import AttentionShape
from worker_svc.attention.triton_backend import TritonBackend
from worker_svc.kernels.triton.rope_store import rope_store

KINDS = {"int8": torch.int8, "fp8": torch.uint8}
SHAPES = by_device(
    cpu=[(Heads(4, 2, 16), 16), (Heads(3, 1, 40), 48)],
    gpu=[(QWEN_0_6B, 64), (Heads(6, 2, 80), 48)],
)


def cache_of(kind: str, heads: Heads, block_size: int, blocks: int) -> torch.Tensor:
    """A cache as the backend allocates it, all of it NaN as far as 8 bits allow."""
    shape = AttentionShape((None,), *heads, torch.bfloat16, DEVICE, kind)  # type: ignore[arg-type]
    (cache,) = TritonBackend(shape, block_size, num_sms=1).allocate(blocks)
    assert cache.dtype == KINDS[kind]
    assert cache.nbytes == shape.cache_bytes_per_token * blocks * block_size
    return cache.fill_(-1)  # the bits of NaN in float32 and in FP8


@pytest.mark.parametrize(("heads", "block_size"), SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_store(kind: str, heads: Heads, block_size: int) -> None:
    """The same codes and scales as the reference's, but for rounding; other slots stay. Rows of
    zeros and of numbers beyond 448 are among them."""
    inputs = storing.random(*heads, torch.float32, tokens=9)
    inputs.qkv[0] = 0
    inputs.qkv[1] *= 1000
    cache = cache_of(kind, heads, block_size, 3)
    slots = torch.randperm(3 * block_size, generator=torch.Generator().manual_seed(0))[:9].int()
    slots[2::3] = -1
    inputs = replace(inputs, cache=cache, slot_mapping=slots.to(DEVICE))
    expected = cache.clone()
    q = rope_store_reference(**{**vars(inputs), "cache": expected})
    assert_close(rope_store(**vars(inputs)), q)

    ours, theirs = dequantized(cache), dequantized(expected)
    assert torch.equal(ours.isnan(), theirs.isnan())
    ours, theirs = ours.nan_to_num(), theirs.nan_to_num()
    # One code more or less, where a number lies between two.
    largest = theirs.abs().amax(-1, keepdim=True)
    smallest = largest / (448 * 2**9)
    step = largest / 127 if kind == "int8" else (theirs.abs() / 8).clamp(min=smallest)
    assert bool(((ours - theirs).abs() <= 1.001 * step).all())
