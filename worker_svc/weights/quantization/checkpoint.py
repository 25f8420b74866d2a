"""The interface of readers of quantized checkpoints, and helpers that the readers share."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Protocol

import torch

from worker_svc.errors import ModelError
from worker_svc.weights.files import WeightReader
from worker_svc.weights.quantization.formats import Format, QuantizedWeight
from worker_svc.weights.quantization.pieces import pack_int4

MAX_SIZE = 2**31 - 1  # inputs or outputs that share a scale
MAX_SHOWN = 200  # characters of a value in an error message


class Checkpoint(Protocol):
    """Reads a checkpoint of one format. Its `quantization_config` has the details of the format.

    The tensors of a layer show whether it is quantized, because configurations may leave it out.
    """

    format: Format

    def holds(self, reader: WeightReader, name: str) -> bool:
        """Whether the layer `name` is quantized."""
        ...

    def read(
        self, reader: WeightReader, name: str, rows: range, columns: range, in_features: int
    ) -> QuantizedWeight:
        """Reads a part of a layer's matrix [out, in_features].

        Raises:
            ModelError: a tensor is missing or has another shape, or its format is not implemented.
        """
        ...


def require(config: Mapping[str, Any], name: str, *implemented: Any) -> Any:
    """The value of the field `name`, whose parts are separated by dots. A missing field is None.

    Raises:
        ModelError: the value is not one of the implemented values.
    """
    value = _field(config, name)
    if not any(type(value) is type(each) and value == each for each in implemented):
        raise _rejected(name, value, ", ".join(map(_in_json, implemented)))
    return value


def require_size(config: Mapping[str, Any], name: str, *implemented: int) -> int:
    """The value of the field `name`, found as in `require`.

    Raises:
        ModelError: the value is neither a positive int32 nor one of the implemented numbers.
    """
    return _size(name, _field(config, name), *implemented)


def require_block(config: Mapping[str, Any], name: str) -> tuple[int, int]:
    """The height and width in the field `name`.

    Raises:
        ModelError: the field is not a list of two sizes.
    """
    value = _field(config, name)
    if not isinstance(value, list) or len(value) != 2:
        raise _rejected(name, value, "two numbers")
    return _size(f"{name}[0]", value[0]), _size(f"{name}[1]", value[1])


def require_object(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The object in the field `name`.

    Raises:
        ModelError: the field is not an object.
    """
    value = _field(config, name)
    if not isinstance(value, Mapping):
        raise _rejected(name, value, "an object")
    return value


def _field(config: Mapping[str, Any], name: str) -> Any:
    value: Any = config
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _size(name: str, value: Any, *implemented: int) -> int:
    if type(value) is not int or not (value in implemented or 0 < value <= MAX_SIZE):
        raise _rejected(name, value, ", ".join(map(str, [*implemented, f"1 to {MAX_SIZE}"])))
    return value


def _rejected(name: str, value: Any, implemented: str) -> ModelError:
    return ModelError(
        f"quantization_config: {name}: {_in_json(value)} is not implemented; "
        f"implemented: {implemented}"
    )


def _in_json(value: Any) -> str:
    try:
        text = value if isinstance(value, str) else json.dumps(value)
    except RecursionError:
        text = "a value nested too deeply"
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def require_shape(reader: WeightReader, name: str, *shape: int) -> None:
    """Checks the shape of tensor `name`. −1 stands for any size.

    Raises:
        ModelError: the tensor has another shape.
    """
    found = reader.shape(name)
    if len(found) != len(shape) or any(b not in (a, -1) for a, b in zip(found, shape, strict=True)):
        raise ModelError(f"{name}: shape {found}, the configuration says {list(shape)}")


def unpack_bits(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [..., n] -> its unsigned numbers, low bits first, int32 [..., n · 32 / bits]."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    return (words.unsqueeze(-1) >> shifts & (1 << bits) - 1).flatten(-2)


def unpack_columns(
    reader: WeightReader, name: str, bits: int, rows: range, columns: range
) -> torch.Tensor:
    """Reads the numbers at `rows` and `columns` of an int32 tensor [rows, columns · bits / 32]
    -> int32."""
    per_word = 32 // bits
    words = range(columns.start // per_word, -(-columns.stop // per_word))
    skipped = columns.start - words.start * per_word
    return unpack_bits(reader.read(name, rows, words), bits)[:, skipped : skipped + len(columns)]


def from_unsigned(
    format: Format, values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None
) -> QuantizedWeight:
    """Makes a weight from values [out, in], which are 0 to 15 or 255, and from scales and zeros
    [out, groups]. Without zeros, or if all zeros are in the middle, the weight is symmetric."""
    middle = 8 if format == "int4" else 128
    if zeros is not None and bool((zeros == middle).all()):
        zeros = None
    if format == "int4":
        codes = pack_int4(values.to(torch.uint8))
    else:
        codes = (values - middle).to(torch.int8)
        zeros = None if zeros is None else zeros - middle
    zeros = None if zeros is None else zeros.to(torch.int16)
    return QuantizedWeight(format, codes, scales.float(), zeros)
