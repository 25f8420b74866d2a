"""Reads checkpoints of AutoAWQ (Lin et al., "AWQ", 2023)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from worker_svc.weights.files import WeightReader
from worker_svc.weights.quantization.checkpoint import (
    from_unsigned,
    require,
    require_shape,
    require_size,
    unpack_columns,
)
from worker_svc.weights.quantization.formats import Format, QuantizedWeight
from worker_svc.weights.quantization.pieces import per_group

# _ORDER[i] is the position in a word, counted from the lowest bits, of the number of output i.
_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


class Awq:
    """Reads integers of 4 bits in the layout "gemm".

    W[o, i] = (q[i, o] − zero[g, o]) · scale[g, o], with g = i // group. qweight [in, out / 8] and
    qzeros [groups, out / 8] are packed along the outputs.

    Source: awq/utils/packing_utils.py, `dequantize_gemm`.
    """

    format: Format = "int4"

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Checks the fields of the configuration.

        Raises:
            ModelError: a field needs a feature that is not implemented.
        """
        require(config, "bits", 4)
        require(config, "version", None, "gemm", "GEMM")
        self._group_size = require_size({"group_size": -1, **config}, "group_size", -1)

    def holds(self, reader: WeightReader, name: str) -> bool:
        return reader.has(f"{name}.qweight")

    def read(
        self, reader: WeightReader, name: str, rows: range, columns: range, in_features: int
    ) -> QuantizedWeight:
        group = self._group_size if self._group_size > 0 else in_features
        groups = -(-in_features // group)
        require_shape(reader, f"{name}.qweight", in_features, -1)
        require_shape(reader, f"{name}.scales", groups, -1)
        values = _read_outputs(reader, f"{name}.qweight", columns, rows)
        scales = reader.read(f"{name}.scales", range(groups), rows).T
        place = (1, group), range(len(rows)), columns
        zeros = None
        if reader.has(f"{name}.qzeros"):  # otherwise the weight is symmetric
            zeros = per_group(_read_outputs(reader, f"{name}.qzeros", range(groups), rows), *place)
        return from_unsigned(self.format, values, per_group(scales, *place), zeros)


def _read_outputs(reader: WeightReader, name: str, inputs: range, outputs: range) -> torch.Tensor:
    """Unpacks a tensor [inputs, outputs / 8] -> its numbers [len(outputs), len(inputs)]."""
    words = range(outputs.start // 8, -(-outputs.stop // 8))
    values = unpack_columns(reader, name, 4, inputs, range(8 * words.start, 8 * words.stop))
    values = values.view(len(inputs), -1, 8)[:, :, list(_ORDER)].flatten(1)
    skipped = outputs.start - 8 * words.start
    return values[:, skipped : skipped + len(outputs)].T
