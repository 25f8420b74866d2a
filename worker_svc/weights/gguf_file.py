"""Reads weights of GGUF files, in a model directory that `worker_svc.gguf` has made.

The package `gguf` knows the types of blocks. Values become float32, a few rows at a time.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

from shared.model_directory import GGUF_INDEX, GGUF_WEIGHTS, is_plain_name, read_text
from worker_svc.errors import ModelError
from worker_svc.weights.gguf_types import READABLE


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of blocks, whose bytes begin at `start` of file `path`.

    Args:
        head_dim: if not 0, rows 2i and 2i + 1 of a head are rows i and head_dim / 2 + i in the
            layout of Hugging Face checkpoints.
        minus: what is subtracted from all numbers.
    """

    path: Path
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    start: int
    head_dim: int = 0
    minus: int = 0

    @property
    def end(self) -> int:
        """The byte after the tensor's last."""
        return self.start + self.shape[0] * self._row_bytes

    @property
    def _row_bytes(self) -> int:
        block, block_bytes = GGML_QUANT_SIZES[self.type]
        return prod(self.shape[1:]) // block * block_bytes

    def read(self, rows: range) -> torch.Tensor:
        """Some of the rows [rows, columns], or elements [size] of a vector, in float32.

        Raises:
            OSError: the file cannot be read, or is too short.
        """
        if not self.head_dim:
            return self._read(rows)
        size = self.head_dim
        first = rows.start // size * size
        read = self._read(range(first, -(-rows.stop // size) * size))
        pairs = read.view(-1, size // 2, 2, *self.shape[1:])
        halves = pairs.transpose(1, 2).reshape(read.shape)
        return halves[rows.start - first : rows.stop - first]

    def _read(self, rows: range) -> torch.Tensor:
        row_bytes = self._row_bytes
        data = np.empty((len(rows), row_bytes), np.uint8)
        with self.path.open("rb", buffering=0) as file:
            at, left = self.start + rows.start * row_bytes, data.reshape(-1).data
            while left:
                count = os.preadv(file.fileno(), [left], at)
                if not count:
                    raise OSError("the file is cut short")
                at, left = at + count, left[count:]
        values = dequantize(data, self.type).astype(np.float32, copy=False)
        read = torch.from_numpy(values).view(len(rows), *self.shape[1:])
        return read - self.minus if self.minus else read


def read_gguf(model_dir: Path) -> dict[str, GgufTensor]:
    """The tensors of a model directory's GGUF files by name.

    Raises:
        ModelError: the index cannot be read, or does not belong to the files.
    """
    path = model_dir / GGUF_INDEX
    try:
        entries = json.loads(read_text(path)).items()
        tensors = {name: _tensor(model_dir, entry) for name, entry in entries}
        sizes = {each: each.stat().st_size for each in {t.path for t in tensors.values()}}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ModelError(f"{path.name}: cannot be read: {error!r}") from error
    for name, tensor in tensors.items():
        size = sizes[tensor.path]
        if tensor.end > size:
            raise ModelError(
                f"{tensor.path.name}: cut short: {name} ends at byte {tensor.end} of {size}"
            )
    return tensors


def gguf_files(model_dir: Path) -> list[Path]:
    """A model directory's GGUF files that have tensors, sorted by name.

    Raises:
        ModelError: as `read_gguf`.
    """
    return sorted({tensor.path for tensor in read_gguf(model_dir).values()})


def _tensor(model_dir: Path, entry: dict[str, Any]) -> GgufTensor:
    shape = tuple(entry["shape"])
    numbers = entry["start"], entry.get("head_dim", 0), entry.get("minus", 0)
    if not shape or any(type(number) is not int or number < 0 for number in (*shape, *numbers)):
        raise ValueError(f"numbers have to be natural: {entry}")
    name, kind = entry.get("file", GGUF_WEIGHTS), GGMLQuantizationType[entry["type"]]
    if not is_plain_name(name):
        raise ValueError(f"{name!r} is not the name of a file beside it")
    if kind not in READABLE:
        raise ValueError(f"type {kind.name} cannot be read")
    return GgufTensor(model_dir / name, kind, shape, *numbers)
