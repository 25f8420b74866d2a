"""Reads checkpoints of the compressed-tensors library, which llm-compressor writes."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch

from worker_svc.errors import ModelError
from worker_svc.weights.files import WeightReader
from worker_svc.weights.quantization.checkpoint import (
    from_unsigned,
    require,
    require_block,
    require_object,
    require_shape,
    require_size,
    unpack_bits,
    unpack_columns,
)
from worker_svc.weights.quantization.formats import Format, QuantizedWeight
from worker_svc.weights.quantization.pieces import per_group


class CompressedTensors:
    """Reads one scheme for all quantized layers: integers of 4 or 8 bits packed into int32
    (pack-quantized), int8 (int-quantized) or float8_e4m3fn (float-quantized).

    W = (q − zero) · scale. There is a scale for the tensor, for each row, for groups of a row or
    for blocks.

    Source: compressed_tensors/quantization/lifecycle/forward.py, `dequantize`.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Checks the fields of the configuration.

        Raises:
            ModelError: a field needs a feature that is not implemented.
        """
        require(config, "kv_cache_scheme", None)
        require(config, "transform_config", None, {})
        require(config, "sparsity_config", None, {})
        groups = require_object(config, "config_groups")
        if len(groups) != 1:
            raise ModelError(
                f"quantization_config: config_groups: {len(groups)} groups are not implemented; "
                "implemented: 1, with its weights"
            )
        (group,) = groups.values()
        group = require_object({"config_groups": group}, "config_groups")
        scheme = {"format": config.get("format")} | {k: v for k, v in group.items() if v}
        formats = "pack-quantized", "int-quantized", "float-quantized", "naive-quantized"
        self._packed = require(scheme, "format", *formats) == "pack-quantized"
        require_object(scheme, "weights")
        self.format, self._bits = _number_format(scheme, self._packed)
        require(scheme, "output_activations", None)
        if "input_activations" in scheme:
            require(scheme, "input_activations.num_bits", 8)
            require(scheme, "input_activations.dynamic", True)
        self._symmetric = require(scheme, "weights.symmetric", True, False)
        require(scheme, "weights.actorder", None, False, "weight", "static")
        strategies = (
            ("channel", "group") if self._packed else ("tensor", "channel", "group", "block")
        )
        self._strategy = require(scheme, "weights.strategy", *strategies)
        if self._strategy == "group":
            self._block_size = 1, require_size(scheme, "weights.group_size")
        if self._strategy == "block":
            self._block_size = require_block(scheme, "weights.block_structure")

    def holds(self, reader: WeightReader, name: str) -> bool:
        return reader.has(f"{name}.weight_scale")

    def read(
        self, reader: WeightReader, name: str, rows: range, columns: range, in_features: int
    ) -> QuantizedWeight:
        block = self._block(in_features)
        scales = _two_dimensional(reader.read(f"{name}.weight_scale").float())
        if scales.shape[1] != -(-in_features // block[1]):
            raise ModelError(
                f"{name}.weight_scale: shape {list(scales.shape)}, the configuration says "
                f"{-(-in_features // block[1])} columns"
            )
        scales = per_group(scales, block, rows, columns)
        zeros = None if self._symmetric else self._zeros(reader, name, block, rows, columns)
        if not self._packed:
            require_shape(reader, f"{name}.weight", -1, in_features)
            codes = reader.read(f"{name}.weight", rows, columns)
            if codes.dtype != (torch.float8_e4m3fn if self.format == "fp8" else torch.int8):
                raise ModelError(f"{name}.weight: {codes.dtype} is not what the configuration says")
            return QuantizedWeight(self.format, codes, scales, zeros)
        reader.skip(f"{name}.weight_shape")
        words = -(-in_features * self._bits // 32)
        require_shape(reader, f"{name}.weight_packed", -1, words)
        if self.format == "int4" and zeros is None and not (columns.start % 8 or columns.stop % 8):
            of_columns = range(columns.start // 8, columns.stop // 8)
            packed = reader.read(f"{name}.weight_packed", rows, of_columns)
            return QuantizedWeight("int4", packed.view(torch.uint8), scales.float())
        values = unpack_columns(reader, f"{name}.weight_packed", self._bits, rows, columns)
        return from_unsigned(self.format, values, scales, zeros)

    def _block(self, in_features: int) -> tuple[int, int]:
        """The rows and columns that share a scale."""
        if self._strategy in ("group", "block"):
            return self._block_size
        return 1 if self._strategy == "channel" else sys.maxsize, in_features

    def _zeros(
        self,
        reader: WeightReader,
        name: str,
        block: tuple[int, int],
        rows: range,
        columns: range,
    ) -> torch.Tensor:
        name = f"{name}.weight_zero_point"
        zeros = reader.read(name)
        if self._packed:  # zeros are packed along the rows
            zeros = unpack_bits(zeros.T.contiguous(), self._bits).T
        return per_group(_two_dimensional(zeros), block, rows, columns).to(torch.int16)


def _number_format(scheme: Mapping[str, Any], packed: bool) -> tuple[Format, int]:
    kind = require(scheme, "weights.type", *(("int",) if packed else ("int", "float")))
    bits = require(scheme, "weights.num_bits", *((4, 8) if packed else (8,)))
    if kind == "float":
        require(scheme, "weights.symmetric", True)
        return "fp8", 8
    return ("int4" if bits == 4 else "int8"), bits


def _two_dimensional(x: torch.Tensor) -> torch.Tensor:
    return x if x.dim() == 2 else x.view(-1, 1)
