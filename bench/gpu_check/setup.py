"""Where a section runs, and on what sizes."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench.gpu_check.records import SkipPart
from bench.gpu_check.timing import Timer
from bench.workload import Shape
from shared.config import WorkerSettings
from worker_svc.attention.base import AttentionShape
from worker_svc.attention.paged import PagedBackend
from worker_svc.errors import StartError
from worker_svc.platforms.base import Platform

# Those that a GPU may have, ours first; "auto" may combine two.
BACKENDS = ("triton", "fa3", "flash_attn", "auto")
OPTIONAL_BACKENDS = ("fa3", "flash_attn")


@dataclass(frozen=True)
class Heads:
    heads: int
    kv_heads: int
    head_dim: int

    def __str__(self) -> str:
        return f"{self.heads}/{self.kv_heads}x{self.head_dim}"


QWEN_0_6B = Heads(16, 8, 128)
QWEN_8B = Heads(32, 8, 128)


@dataclass(frozen=True)
class Sizes:
    """The defaults are those of a GPU."""

    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)
    # Kernels between matrix products. The odd ones are neither powers of two nor multiples of 16.
    widths: tuple[int, ...] = (1024, 4096, 1003)
    tokens: tuple[int, ...] = (1, 3, 256, 1000, 4096)
    heads: tuple[Heads, ...] = (QWEN_0_6B, QWEN_8B, Heads(6, 2, 80))
    vocab_sizes: tuple[int, ...] = (151_936, 32_003)
    rows: tuple[int, ...] = (1, 7, 256)
    # Attention.
    block_sizes: tuple[int, ...] = (16, 64, 256)
    decode_batches: tuple[int, ...] = (1, 7, 256)
    splits: tuple[int, ...] = (1, 3, 16)
    longest: int = 4096
    large_cache_elements: int = 2**31 + 2**24  # of the keys alone
    # The small model, and the steps that it runs.
    model: tuple[tuple[str, Any], ...] = (
        ("hidden_size", 1024),
        ("num_hidden_layers", 4),
        ("num_attention_heads", 16),
        ("num_key_value_heads", 8),
        ("head_dim", 128),
        ("intermediate_size", 3072),
        ("vocab_size", 32_003),
    )
    texts: tuple[int, ...] = (2, 17, 64, 255, 256, 300, 513, 1000)
    decodes: int = 16
    graph_batches: tuple[int, ...] = (1, 3, 8, 13, 100)
    graph_prompt: int = 70  # tokens, at most
    # Measurements.
    copy_bytes: int = 2**30
    rotated_bytes: int = 2**29  # several times the L2 cache
    speed_heads: tuple[tuple[str, Heads], ...] = (("0.6B", QWEN_0_6B), ("8B", QWEN_8B))
    speed_batches: tuple[int, ...] = (1, 64, 256)
    speed_contexts: tuple[int, ...] = (600, 4096)
    matmul: int = 8192
    prompts: tuple[tuple[int, int, int], ...] = (  # sequences, their queries, their context
        (1, 4096, 4096),
        (8, 1024, 1024),
        (1, 2048, 8192),
    )
    max_model_len: int = 4096
    max_num_batched_tokens: int = 16_384
    prompt_steps: tuple[tuple[int, int], ...] = ((2, 1024), (8, 1024))  # sequences, tokens
    repeats: int = 30
    workload: Shape = field(default_factory=Shape)
    cache_tokens: int = 2**19  # of the reference workload


@dataclass(frozen=True)
class Setup:
    device: torch.device
    platform: Callable[[WorkerSettings], Platform]
    # Runs anew what `platform` would capture in a graph.
    uncaptured: Callable[[WorkerSettings], Platform]
    timer: Timer
    directory: Path  # for models
    model: Path  # of the sections that need one
    peer: Path | None  # a checkout of nano-vLLM
    seed: int
    sizes: Sizes = Sizes()

    @property
    def dtype(self) -> torch.dtype:
        """What models run in."""
        return self.sizes.dtypes[0]

    def settings(self, model: Path | str = "", **settings: Any) -> WorkerSettings:
        """Of this device and dtype."""
        names: dict[str, Any] = {
            "device": self.device.type,
            "dtype": str(self.dtype).removeprefix("torch."),
        }
        return WorkerSettings(model=str(model), **names, **settings)

    def backend(
        self,
        name: str,
        heads: Heads,
        dtype: torch.dtype,
        *,
        layers: int = 1,
        block_size: int | str = "auto",
    ) -> PagedBackend[Any]:
        """
        Raises:
            SkipPart: it is not installed, or not for this GPU; or auto is one of the others.
        """
        settings = self.settings(attention=name, block_size=block_size)
        shape = AttentionShape(
            layers, heads.heads, heads.kv_heads, heads.head_dim, dtype, self.device
        )
        try:
            backend = self.platform(settings).attention_backend(settings, shape)
        except StartError as error:
            if name in OPTIONAL_BACKENDS:
                raise SkipPart(str(error)) from error
            raise
        assert isinstance(backend, PagedBackend)
        if name == "auto" and backend.name in BACKENDS:
            raise SkipPart(f"auto is {backend.name} here")
        return backend

    def generator(self, part: str) -> torch.Generator:
        """Random numbers on the device, a part's own."""
        return torch.Generator(self.device).manual_seed(self.part_seed(part))

    def part_seed(self, part: str) -> int:
        return zlib.crc32(f"{self.seed} {part}".encode())
