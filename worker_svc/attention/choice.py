"""Chooses the attention backend of a GPU."""

from __future__ import annotations

from typing import Any

import structlog

from worker_svc.attention import fa3, flash_attn
from worker_svc.attention.base import KV_SCALE_BYTES, AttentionShape
from worker_svc.attention.fa3 import FlashAttention3
from worker_svc.attention.flash_attn import BLOCK_SIZE_MULTIPLE, FlashAttention2
from worker_svc.attention.paged import PagedBackend
from worker_svc.attention.per_phase import PerPhase
from worker_svc.attention.probe import find_obstacle, probed_shape
from worker_svc.attention.triton_backend import TritonBackend
from worker_svc.errors import StartError

# Auto takes the first backend that works. The libraries serve prompts only. To decode, they would
# spend a tile of 64 to 128 queries on the two queries that share a KV head in a small model.
BACKENDS = ("fa3", "flash_attn", "triton")
# In tokens. Blocks are small, so that prompts which differ late still share most of their blocks.
# FlashAttention 3 loads whole pages with the tensor memory accelerator only from 128 tokens on.
TRITON_BLOCK_SIZE = 64
FA3_BLOCK_SIZE = 128
HOPPER = (9, 0)

log = structlog.get_logger(__name__)


def choose_backend(
    name: str,
    shape: AttentionShape,
    block_size: int | None,
    capability: tuple[int, int],
    num_sms: int,
) -> PagedBackend[Any]:
    """Makes the backend called `name`, or for auto the first of `BACKENDS` that works.

    Args:
        name: auto, or one of `BACKENDS`.
        block_size: tokens; None for the backend's preference.
        capability, num_sms: the GPU's compute capability and number of multiprocessors.

    Raises:
        StartError: the backend requested by name is not installed, or cannot serve this model.
    """
    reason = ""
    for candidate in BACKENDS if name == "auto" else (name,):
        reason = _obstacle(candidate, shape, block_size, capability)
        if not reason:
            if candidate != "triton":
                reason = find_obstacle(_make(candidate, probed_shape(shape), block_size, num_sms))
            if not reason:
                return _make(candidate, shape, block_size, num_sms)
            log.warning("attention backend cannot be used", name=candidate, reason=reason)
    raise StartError(f"attention: {candidate} cannot be used: {reason}")


def _make(
    name: str, shape: AttentionShape, block_size: int | None, num_sms: int
) -> PagedBackend[Any]:
    if name == "triton":
        return TritonBackend(shape, block_size or TRITON_BLOCK_SIZE, num_sms)
    library: PagedBackend[Any]
    if name == "fa3":
        library = FlashAttention3(shape, block_size or FA3_BLOCK_SIZE)
    else:
        library = FlashAttention2(shape, block_size or BLOCK_SIZE_MULTIPLE)
    return PerPhase(library, TritonBackend(shape, library.block_size, num_sms))


def _obstacle(
    name: str, shape: AttentionShape, block_size: int | None, capability: tuple[int, int]
) -> str:
    """The reason why `name` cannot be used here; empty if none is known yet."""
    if shape.kv_dtype != "auto" and name != "triton":
        return f"kv_dtype: {name} has no {shape.kv_dtype} cache; triton has"
    if shape.kv_dtype != "auto" and shape.head_dim % KV_SCALE_BYTES:
        return f"kv_dtype: head_dim {shape.head_dim} is not a multiple of {KV_SCALE_BYTES}"
    if name == "fa3":
        if capability != HOPPER:
            return "it is for Hopper GPUs, this one has capability {}.{}".format(*capability)
        if not fa3.load():
            return (
                f"module {fa3.MODULE} is missing or does not load; install FlashAttention 3 from "
                "github.com/Dao-AILab/flash-attention, folder hopper"
            )
    elif name == "flash_attn":
        if not flash_attn.load():
            return f"module {flash_attn.MODULE} is missing or does not load; pip install flash-attn"
        if block_size and block_size % BLOCK_SIZE_MULTIPLE:
            return f"block_size {block_size} is not a multiple of {BLOCK_SIZE_MULTIPLE}"
    if name != "triton" and shape.head_dim % 8:
        return f"head_dim {shape.head_dim} is not a multiple of 8"
    if not 8 < shape.head_dim <= 256:
        return f"head_dim {shape.head_dim} is not in 9..256"
    return ""
