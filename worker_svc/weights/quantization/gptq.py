"""Reads checkpoints of AutoGPTQ and GPTQModel (Frantar et al., "GPTQ", 2022)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from worker_svc.errors import ModelError
from worker_svc.weights.files import WeightReader
from worker_svc.weights.quantization.checkpoint import (
    from_unsigned,
    require,
    require_shape,
    require_size,
    unpack_bits,
    unpack_columns,
)
from worker_svc.weights.quantization.formats import Format, QuantizedWeight
from worker_svc.weights.quantization.pieces import per_group


class Gptq:
    """Reads integers of 4 or 8 bits.

    W[o, i] = (q[i, o] − zero[g, o]) · scale[g, o], with g = i // group. qweight
    [in · bits / 32, out] is packed along the inputs, qzeros [groups, out · bits / 32] along the
    outputs. The first version of the format stores zero − 1, modulo 2^bits.

    Source: auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Checks the fields of the configuration.

        Raises:
            ModelError: a field needs a feature that is not implemented.
        """
        self._bits = require(config, "bits", 4, 8)
        self.format: Format = "int4" if self._bits == 4 else "int8"
        version = require(config, "checkpoint_format", None, "gptq", "gptq_v2")
        self._zeros_stored_less = 0 if version == "gptq_v2" else 1
        require(config, "is_marlin_format", None, False)
        require(config, "dynamic", None, {})  # other bits for some layers
        require(config, "pack_dtype", None, "int32")
        self._group_size = require_size({"group_size": -1, **config}, "group_size", -1)

    def holds(self, reader: WeightReader, name: str) -> bool:
        return reader.has(f"{name}.qweight")

    def read(
        self, reader: WeightReader, name: str, rows: range, columns: range, in_features: int
    ) -> QuantizedWeight:
        group = self._group_size if self._group_size > 0 else in_features
        groups = -(-in_features // group)
        self._check_order(reader, f"{name}.g_idx", in_features, group)
        require_shape(reader, f"{name}.qweight", in_features * self._bits // 32, -1)
        require_shape(reader, f"{name}.scales", groups, -1)
        per_word = 32 // self._bits
        words = range(columns.start // per_word, -(-columns.stop // per_word))
        skipped = columns.start - words.start * per_word
        values = unpack_bits(reader.read(f"{name}.qweight", words, rows).T, self._bits)
        values = values[:, skipped : skipped + len(columns)]
        scales = reader.read(f"{name}.scales", range(groups), rows).T
        zeros = unpack_columns(reader, f"{name}.qzeros", self._bits, range(groups), rows).T
        zeros = zeros + self._zeros_stored_less & (1 << self._bits) - 1
        place = (1, group), range(len(rows)), columns
        return from_unsigned(
            self.format, values, per_group(scales, *place), per_group(zeros, *place)
        )

    def _check_order(self, reader: WeightReader, name: str, in_features: int, group: int) -> None:
        """Checks that the inputs of a group are next to each other.

        Raises:
            ModelError: they are not.
        """
        if not reader.has(name):
            return
        in_order = torch.arange(in_features, device=reader.device) // group
        if not torch.equal(reader.read(name).long(), in_order):
            raise ModelError(
                f"quantization_config: desc_act: true is not implemented ({name} is out of order)"
            )
