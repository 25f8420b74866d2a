"""Paged caches: larger than 32 bits can count, and what their kernels should have stored."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F

from tests.worker_svc.device import DEVICE, ON_GPU
from worker_svc.kernels.triton.quantized_cache import SCALE_BYTES, head_size
from worker_svc.weights.quantization.formats import quantize_rows


def large_cache(last_blocks: tuple[int, ...], dtype: torch.dtype, path: Path) -> torch.Tensor:
    """A cache [2, blocks, block_size, kv_heads, head_dim] whose `last_blocks` (their number, and
    the other sizes) lie beyond 2³¹ elements of the keys alone. On a CPU it is a sparse file, whose
    untouched parts take no memory."""
    count, *block = last_blocks
    blocks = -(-(2**31) // torch.Size(block).numel()) + count
    shape = torch.Size((2, blocks, *block))
    if ON_GPU:
        return torch.empty(shape, dtype=dtype, device=DEVICE)
    file = torch.from_file(str(path), shared=True, size=shape.numel(), dtype=dtype)
    return file.view(shape)


def store_reference(
    k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor, cache: torch.Tensor
) -> None:
    """Stores k and v [T, kv_heads, head_dim] in the slots slot_mapping [T] (−1: nowhere) of a cache
    of any dtype."""
    kept = slot_mapping >= 0
    slots, block_size = slot_mapping[kept].long(), cache.shape[2]
    places = slots // block_size, slots % block_size
    for plane, new in zip(cache, (k[kept].float(), v[kept].float()), strict=True):
        if cache.dtype.itemsize == 1:
            codes, scales = _parts(plane[None])
            if cache.dtype == torch.int8:
                rows, row_scales = quantize_rows(new.flatten(0, 1))
            else:
                row_scales = new.flatten(0, 1).abs().amax(1, keepdim=True) / 448
                rows = new.flatten(0, 1) / row_scales.where(row_scales > 0, 1)
                rows = rows.to(torch.float8_e4m3fn).view(torch.uint8)
            codes[0][places] = rows.view(new.shape)
            scales[0].transpose(1, 2)[places] = row_scales.view(new.shape[:2])
        else:
            plane[places] = new.to(cache.dtype)


def dequantized(cache: torch.Tensor) -> torch.Tensor:
    """The numbers in a cache of any dtype, float32 [2, blocks, block_size, kv_heads, head_dim]."""
    if cache.dtype.itemsize > 1:
        return cache.float()
    codes, scales = _parts(cache)
    if cache.dtype == torch.uint8:
        codes = codes.view(torch.float8_e4m3fn)
    return codes.float() * scales.transpose(2, 3).unsqueeze(4)


def _parts(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the codes [planes, blocks, block_size, kv_heads, head_dim] and the scales
    float32 [planes, blocks, kv_heads, block_size]."""
    block_size, kv_heads = cache.shape[2:4]
    blocks = cache.flatten(2)
    size = block_size * kv_heads * head_size(cache)
    codes = blocks[:, :, :size].unflatten(2, (block_size, kv_heads, -1))
    scales = blocks.view(torch.float32)[:, :, size // SCALE_BYTES :]
    return codes, scales.unflatten(2, (kv_heads, block_size))


def rope_store_reference(
    qkv: torch.Tensor,
    num_heads: int,
    norm: tuple[torch.Tensor, torch.Tensor, float] | None,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    cache: torch.Tensor,
) -> torch.Tensor:
    kv_heads, head_dim = cache.shape[3], head_size(cache)
    heads = qkv.float().unflatten(1, (-1, head_dim))
    q, k, v = heads.split((num_heads, kv_heads, kv_heads), dim=1)
    cos, sin = cos_sin[positions.long()].unsqueeze(1).unbind(dim=2)  # [T, 1, head_dim / 2]
    q_weight, k_weight, eps = norm or (None, None, 0.0)

    def norm_and_rotate(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        if weight is not None:
            x = F.rms_norm(x, (head_dim,), weight.float(), eps)
        first, second = x.chunk(2, dim=2)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=2)

    store_reference(norm_and_rotate(k, k_weight), v, slot_mapping, cache)
    return norm_and_rotate(q, q_weight).to(qkv.dtype)
