"""Reads weights of *.safetensors or of a GGUF file one tensor at a time. A rank reads only its own
slice."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import chain
from math import prod
from pathlib import Path
from typing import Self

import torch
from tqdm import tqdm

from shared.model_directory import GGUF_INDEX
from worker_svc.errors import ModelError
from worker_svc.weights.gguf_file import GgufTensor, gguf_files, read_gguf
from worker_svc.weights.no_effect import has_no_effect
from worker_svc.weights.safetensors_file import NAMES, StoredTensor, read_tensors
from worker_svc.weights.shards import shard_files, tensor_files

Tensor = StoredTensor | GgufTensor
_LANGUAGE_MODEL = "language_model."  # begins the names of its tensors beside an encoder of images
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
# The number of bytes converted at a time, so few that they are still in the CPU's cache.
_BUFFER_BYTES = 4 << 20


class WeightReader:
    """Reads the tensors of a checkpoint by name and notices tensors that are left over.

    It reads into the caller's memory. A tensor that has to be converted or copied to a device goes
    through a small buffer.
    """

    def __init__(
        self,
        model_dir: Path,
        dtype: torch.dtype,
        device: torch.device,
        copy: Callable[[torch.Tensor, torch.Tensor], object] = torch.Tensor.copy_,
    ) -> None:
        """Reads the headers of the weight files.

        Args:
            copy: `copy(out, source)` copies tensors to the device, see `Platform.weight_copies`.

        Raises:
            ModelError: a file is missing or malformed, or does not hold the tensors that it should
                (see `tensor_files`).
        """
        self.dtype = dtype
        self.device = device
        self._copy = copy
        self._tensors: dict[str, Tensor] = {}
        if (model_dir / GGUF_INDEX).exists():
            self._tensors.update(read_gguf(model_dir))
        else:
            stored = {path: read_tensors(path) for path in weight_files(model_dir)}
            files = tensor_files(model_dir, stored)
            self._tensors.update((name, stored[path][name]) for name, path in files.items())
        self._tensors = _of_text(self._tensors)
        self._unread = set(self._tensors)
        self._layers = defaultdict[str, list[str]](list)  # the names of their tensors
        for name in self._tensors:
            self._layers[name.rpartition(".")[0]].append(name)
        self._buffer = torch.empty(_BUFFER_BYTES, dtype=torch.uint8)
        # disable=None shows the bar only if stderr is a terminal.
        self._progress = tqdm(
            total=len(self._tensors), desc="loading weights", unit="tensor", disable=None
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.close()

    def read_into(
        self, out: torch.Tensor, name: str, *, dim: int = 0, start: int | None = None
    ) -> None:
        """Reads tensor `name` into `out`, which is contiguous, and converts its dtype.

        If `start` is given, only the slice [start, start + out.shape[dim]) along `dim`, 0 or 1, is
        read.

        Raises:
            ModelError: the tensor is missing, has another shape, or has no floating-point numbers.
        """
        tensor = self._tensor(name)
        shape, expected = list(tensor.shape), list(out.shape)
        ranges = [range(size) for size in expected]
        if start is not None and len(shape) == len(expected):
            ranges[dim] = range(start, start + expected[dim])
            if shape[dim] < ranges[dim].stop:
                raise ModelError(f"{name}: shape {shape}, too short in dimension {dim}")
            expected[dim] = shape[dim]
        if shape != expected:
            raise ModelError(f"{name}: shape {shape}, the configuration says {expected}")
        if isinstance(tensor, GgufTensor):
            self._dequantize(out, name, tensor, ranges)
        elif tensor.dtype in _FLOATS:
            self._fill(out, name, tensor, ranges)
        else:
            raise ModelError(
                f"{name}: its dtype, {NAMES[tensor.dtype]}, is one of quantized weights"
            )

    def read(self, name: str, *ranges: range) -> torch.Tensor:
        """Reads tensor `name` in its own dtype, or `ranges` of its one or two dimensions.

        Raises:
            ModelError: the tensor is missing, or smaller than `ranges`.
        """
        tensor = self._tensor(name)
        assert isinstance(tensor, StoredTensor)  # a directory of a GGUF file has no other format
        shape, sizes = list(tensor.shape), [each.stop for each in ranges]
        if ranges and (
            len(sizes) != len(shape) or any(a > b for a, b in zip(sizes, shape, strict=True))
        ):
            raise ModelError(f"{name}: shape {shape}, the configuration says {sizes}")
        ranges = ranges or tuple(range(size) for size in shape)
        out = torch.empty(list(map(len, ranges)), dtype=tensor.dtype, device=self.device)
        self._fill(out, name, tensor, ranges)
        return out

    def shape(self, name: str) -> list[int]:
        """The shape of tensor `name`.

        Raises:
            ModelError: the tensor is missing.
        """
        return list(self._tensor(name).shape)

    def has(self, name: str) -> bool:
        return name in self._tensors

    def same_rows(self, name: str, other: str, rows: range) -> bool:
        """Whether two matrices have one shape and dtype, and the same bytes in `rows`.

        Raises:
            ModelError: a matrix is missing, or cannot be read.
        """
        first, second = self._tensor(name), self._tensor(other)
        assert isinstance(first, StoredTensor)  # a GGUF file has no copies
        assert isinstance(second, StoredTensor)
        if (first.shape, first.dtype) != (second.shape, second.dtype) or len(first.shape) != 2:
            return False
        columns = range(first.shape[1])
        step = max(_BUFFER_BYTES // (first.dtype.itemsize * max(len(columns), 1)), 1)
        pieces = (rows[start : start + step] for start in range(0, len(rows), step))
        return all(
            torch.equal(
                self.read(name, piece, columns).view(torch.uint8),
                self.read(other, piece, columns).view(torch.uint8),
            )
            for piece in pieces
        )

    def on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` itself if it is on the device, else a copy on the device."""
        if tensor.device == self.device:
            return tensor
        out = torch.empty_like(tensor, device=self.device)
        self._copy(out, tensor)
        return out

    def skip(self, *names: str) -> None:
        """Allows these tensors, or all tensors of layers with these names, to stay unread, if they
        exist."""
        of_layers = (self._layers.get(name, ()) for name in names)
        found = self._unread.intersection(chain(names, *of_layers))
        self._unread -= found
        self._progress.update(len(found))

    def skip_under(self, *prefixes: str) -> None:
        """Allows all tensors whose names begin so to stay unread."""
        self.skip(*(name for name in self._unread if name.startswith(prefixes)))

    def check_all_read(self) -> None:
        """Checks that no tensor is left over that may change the model.

        Raises:
            ModelError: the checkpoint has tensors that the model does not have.
        """
        names = [
            name for name in sorted(self._unread) if not has_no_effect(name, self.has, self.read)
        ]
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ModelError(f"unknown weight: {', '.join(names[:3])}{more}")

    def _tensor(self, name: str) -> Tensor:
        if name not in self._tensors:
            raise ModelError(f"missing weight: {name}")
        self.skip(name)
        return self._tensors[name]

    def _fill(
        self, out: torch.Tensor, name: str, tensor: StoredTensor, ranges: Sequence[range]
    ) -> None:
        """Reads `ranges` of a tensor into `out`."""
        runs, flat = tensor.runs(ranges), out.view(-1)
        direct = out.dtype == tensor.dtype and out.device.type == "cpu"
        buffer = flat if direct else self._buffer.view(tensor.dtype)
        try:
            with tensor.path.open("rb", buffering=0) as file:
                for start in range(0, len(flat), max(len(buffer), 1)):
                    part = buffer[: len(flat) - start]
                    data = part.view(torch.uint8).numpy().data
                    if not runs.read(file.fileno(), start * tensor.dtype.itemsize, data):
                        raise ModelError(f"{tensor.path.name}: cut short: {name} is not all there")
                    if not direct:
                        self._copy(flat[start : start + len(part)], part)
        except OSError as error:
            raise ModelError(f"{tensor.path.name}: cannot read {name}: {error}") from error

    def _dequantize(
        self, out: torch.Tensor, name: str, tensor: GgufTensor, ranges: Sequence[range]
    ) -> None:
        """Reads `ranges` of a tensor into `out`."""
        rows, *columns = ranges
        step = max(_BUFFER_BYTES // (4 * prod(tensor.shape[1:])), 1)
        try:
            for start in range(rows.start, rows.stop, step):
                part = range(start, min(start + step, rows.stop))
                values = tensor.read(part)
                for each in columns:
                    values = values[:, each.start : each.stop]
                self._copy(out[part.start - rows.start : part.stop - rows.start], values)
        except OSError as error:
            raise ModelError(f"{tensor.path.name}: cannot read {name}: {error}") from error


def _of_text(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Names the tensors of a language model as one with a head has them, and leaves out those of
    other parts, such as the encoder of images."""
    if of_text := [name for name in tensors if name.startswith(_LANGUAGE_MODEL)]:
        return {name.removeprefix(_LANGUAGE_MODEL): tensors[name] for name in of_text}
    if table := tensors.get("embed_tokens.weight"):
        # An embedding model, saved without a head and a prefix. Any head will do.
        return {**{f"model.{k}": v for k, v in tensors.items()}, "lm_head.weight": table}
    return tensors


def weight_files(model_dir: Path) -> list[Path]:
    """The weight files of a checkpoint, sorted by name.

    Raises:
        ModelError: there are no weight files, or as `shard_files`.
    """
    if (model_dir / GGUF_INDEX).exists():
        return gguf_files(model_dir)
    paths = shard_files(model_dir)
    if not paths:
        raise ModelError(f"model: no *.safetensors in {model_dir}")
    return paths
