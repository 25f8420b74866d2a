"""Chooses how a model's weights are read, from the setting and the checkpoint's configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from worker_svc.errors import ModelError
from worker_svc.weights.quantization.awq import Awq
from worker_svc.weights.quantization.block_fp8 import BlockFp8
from worker_svc.weights.quantization.checkpoint import Checkpoint, require
from worker_svc.weights.quantization.compressed_tensors import CompressedTensors
from worker_svc.weights.quantization.formats import Format
from worker_svc.weights.quantization.gptq import Gptq

# Readers by `quant_method`.
CHECKPOINTS: dict[str, Callable[[Mapping[str, Any]], Checkpoint]] = {
    "awq": Awq,
    "compressed-tensors": CompressedTensors,
    "fp8": BlockFp8,
    "gptq": Gptq,
}


@dataclass(frozen=True)
class Choice:
    """The formats of a model's weights.

    Args:
        checkpoint: reads the weights that the checkpoint holds quantized.
        quantize_to: the format to which to quantize a checkpoint that holds none, or else only its
            embedding and head.
    """

    checkpoint: Checkpoint | None = None
    quantize_to: Format | None = None

    @property
    def format(self) -> str:
        """int8, int4 or fp8, or "none" if weights stay floating-point numbers."""
        return self.checkpoint.format if self.checkpoint else self.quantize_to or "none"

    @property
    def name(self) -> str:
        """The format, different if other matrices have it."""
        return f"{self.format}-all" if self.checkpoint and self.quantize_to else self.format


def choose_quantization(setting: str, config: Mapping[str, Any] | None) -> Choice:
    """Chooses how to read the weights.

    Args:
        setting: `WorkerSettings.quantization`.
        config: the checkpoint's `quantization_config`, if it has one.

    Raises:
        ModelError: the checkpoint's format is not implemented, or is not the format in `setting`.
    """
    formats: dict[str, Format] = {"int8": "int8", "int4": "int4", "fp8": "fp8"}
    quantize_to = formats.get(setting)
    if not config:
        return Choice(None, quantize_to)
    method = require(config, "quant_method", *CHECKPOINTS)
    own = CHECKPOINTS[method](config)
    if setting not in ("auto", own.format):
        raise ModelError(f"quantization: {setting}, but the checkpoint is {own.format} ({method})")
    return Choice(own, quantize_to)
