"""The attention heads of the models that are measured and tested."""

from __future__ import annotations

from typing import NamedTuple


class Heads(NamedTuple):
    heads: int
    kv_heads: int
    head_dim: int

    def __str__(self) -> str:
        return f"{self.heads}/{self.kv_heads}x{self.head_dim}"


QWEN_0_6B = Heads(16, 8, 128)
QWEN_8B = Heads(32, 8, 128)
