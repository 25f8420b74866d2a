"""Reads Qwen's own FP8 checkpoints, which have the format of DeepSeek-V3's checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from worker_svc.errors import ModelError
from worker_svc.weights.files import WeightReader
from worker_svc.weights.quantization.checkpoint import require, require_block, require_shape
from worker_svc.weights.quantization.formats import Format, QuantizedWeight
from worker_svc.weights.quantization.pieces import per_group


class BlockFp8:
    """Reads float8_e4m3fn weights: W[o, i] = q[o, i] · weight_scale_inv[o // height, i // width].

    Source: transformers/integrations/finegrained_fp8.py.
    """

    format: Format = "fp8"

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Checks the fields of the configuration.

        Raises:
            ModelError: a field needs a feature that is not implemented.
        """
        require(config, "fmt", None, "e4m3")
        require(config, "activation_scheme", None, "dynamic")
        self._block = require_block(config, "weight_block_size")

    def holds(self, reader: WeightReader, name: str) -> bool:
        return reader.has(f"{name}.weight_scale_inv")

    def read(
        self, reader: WeightReader, name: str, rows: range, columns: range, in_features: int
    ) -> QuantizedWeight:
        blocks = -(-in_features // self._block[1])
        require_shape(reader, f"{name}.weight", -1, in_features)
        require_shape(reader, f"{name}.weight_scale_inv", -1, blocks)
        codes = reader.read(f"{name}.weight", rows, columns)
        if codes.dtype != torch.float8_e4m3fn:
            raise ModelError(f"{name}.weight: {codes.dtype} is not what the configuration says")
        scales = reader.read(f"{name}.weight_scale_inv").float()
        return QuantizedWeight(self.format, codes, per_group(scales, self._block, rows, columns))
