"""Which attention backend a GPU gets."""

from __future__ import annotations

from typing import Any

from worker_svc.attention import fa3, flash_attn
from worker_svc.attention.base import AttentionShape
from worker_svc.attention.fa3 import FlashAttention3
from worker_svc.attention.flash_attn import BLOCK_SIZE_MULTIPLE, FlashAttention2
from worker_svc.attention.paged import PagedBackend, PerPhase
from worker_svc.attention.triton_backend import TritonBackend
from worker_svc.errors import StartError

# Small enough that prompts which differ late still share most of their blocks.
DEFAULT_BLOCK_SIZE = 64
HOPPER = (9, 0)


def choose_backend(
    name: str,
    shape: AttentionShape,
    block_size: int | None,
    capability: tuple[int, int],
    num_sms: int,
) -> PagedBackend[Any]:
    """
    Args:
        name: a setting: auto, fa3, flash_attn or triton.
        block_size: tokens; None for what the backend wants.
        capability, num_sms: compute capability and multiprocessors of the GPU.

    Raises:
        StartError: a backend asked for by name is not installed, or cannot serve this.
    """
    if name == "auto":
        name = _fastest(shape, block_size, capability)
    reasons = _obstacles(name, shape, block_size, capability)
    if reasons:
        raise StartError(f"attention: {name} cannot be used: {reasons[0]}")
    if name == "fa3":
        return FlashAttention3(shape, block_size or DEFAULT_BLOCK_SIZE, num_sms)
    if name == "triton":
        return TritonBackend(shape, block_size or DEFAULT_BLOCK_SIZE, num_sms)
    mixed = FlashAttention2(shape, block_size or BLOCK_SIZE_MULTIPLE)
    if name == "flash_attn":
        return mixed
    return PerPhase(mixed, decodes=TritonBackend(shape, mixed.block_size, num_sms))


def _fastest(shape: AttentionShape, block_size: int | None, capability: tuple[int, int]) -> str:
    for name in ("fa3", "flash_attn+triton"):
        if not _obstacles(name, shape, block_size, capability):
            return name
    return "triton"


def _obstacles(
    name: str, shape: AttentionShape, block_size: int | None, capability: tuple[int, int]
) -> list[str]:
    """Why `name` cannot be used here."""
    found = []
    if name == "fa3":
        if capability != HOPPER:
            found.append(f"it is for Hopper GPUs, this one has capability {_dotted(capability)}")
        elif not fa3.is_installed():
            found.append(
                f"module {fa3.MODULE} is missing or does not load; install FlashAttention 3 from "
                "github.com/Dao-AILab/flash-attention, folder hopper"
            )
    elif name.startswith("flash_attn"):
        if capability < (8, 0):
            found.append(f"it needs Ampere or newer, this GPU has {_dotted(capability)}")
        elif not flash_attn.is_installed():
            found.append(
                f"module {flash_attn.MODULE} is missing or does not load; pip install flash-attn"
            )
        if block_size and block_size % BLOCK_SIZE_MULTIPLE:
            found.append(f"block_size {block_size} is no multiple of {BLOCK_SIZE_MULTIPLE}")
    if name != "triton" and (shape.head_dim % 8 or shape.head_dim > 256):
        found.append(f"head_dim {shape.head_dim} is no multiple of 8 up to 256")
    return found


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
