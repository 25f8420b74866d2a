"""Reads weights from *.safetensors one tensor at a time, each rank only its own slice."""

from __future__ import annotations

import hashlib
import json
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from worker_svc.errors import ModelError

INDEX = "model.safetensors.index.json"
_FLOATS = ("F64", "F32", "F16", "BF16")
# Of each file, for `contents_digest`.
_SAMPLES, _SAMPLE_BYTES = 16, 1 << 16


class WeightReader:
    """Hands out the tensors of a checkpoint by name and notices any left over.

    A file is mapped for one tensor at a time: the pages read would otherwise count as this
    process's memory until loading ends.
    """

    def __init__(
        self,
        model_dir: Path,
        dtype: torch.dtype,
        device: torch.device,
        copy: Callable[[torch.Tensor, torch.Tensor], object] = torch.Tensor.copy_,
    ) -> None:
        """`copy(out, source)` brings tensors to the device, as in `Platform.weight_copies`."""
        self.dtype = dtype
        self.device = device
        self._copy = copy
        self._files = dict(_locate(model_dir))
        self._unread = set(self._files)
        # disable=None: no bar unless stderr is a terminal.
        self._progress = tqdm(
            total=len(self._files), desc="loading weights", unit="tensor", disable=None
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.close()

    def read_into(
        self, out: torch.Tensor, name: str, *, dim: int = 0, start: int | None = None
    ) -> None:
        """Copies tensor `name` into `out`, converting its dtype.

        With `start`, only the slice [start, start + out.shape[dim]) along `dim` is read.

        Raises:
            ModelError: there is no such tensor, it has another shape or no floating-point numbers.
        """
        with self._open(name) as tensor:
            if tensor.get_dtype() not in _FLOATS:
                raise ModelError(
                    f"{name}: its dtype, {tensor.get_dtype()}, is one of quantized weights"
                )
            shape, expected = list(tensor.get_shape()), list(out.shape)
            if start is not None and len(shape) == len(expected):
                if shape[dim] < start + expected[dim]:
                    raise ModelError(f"{name}: shape {shape}, too short in dimension {dim}")
                expected[dim] = shape[dim]
            if shape != expected:
                raise ModelError(f"{name}: shape {shape}, the configuration says {expected}")
            if start is None:
                self._copy(out, tensor[:])
            elif dim == 0:
                self._copy(out, tensor[start : start + out.shape[0]])
            else:
                self._copy(out, tensor[:, start : start + out.shape[1]])

    def read(self, name: str, *ranges: range) -> torch.Tensor:
        """A copy of tensor `name` in its own dtype, or of what `ranges` leave of each dimension.

        Raises:
            ModelError: there is no such tensor, or it is smaller.
        """
        with self._open(name) as tensor:
            shape = tensor.get_shape()
            if ranges:
                sizes = [each.stop for each in ranges]
                if len(sizes) != len(shape) or any(
                    a > b for a, b in zip(sizes, shape, strict=True)
                ):
                    raise ModelError(f"{name}: shape {shape}, the configuration says {sizes}")
                source = tensor[tuple(slice(each.start, each.stop) for each in ranges)]
            else:
                source = tensor[...]
            out = torch.empty(source.shape, dtype=source.dtype, device=self.device)
            self._copy(out, source)
        return out

    def shape(self, name: str) -> list[int]:
        """The shape of tensor `name`.

        Raises:
            ModelError: there is no such tensor.
        """
        with self._open(name) as tensor:
            return list(tensor.get_shape())

    def has(self, name: str) -> bool:
        return name in self._files

    def on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` itself if that is where it has to be, else a copy there."""
        if tensor.device == self.device:
            return tensor
        out = torch.empty_like(tensor, device=self.device)
        self._copy(out, tensor)
        return out

    def skip(self, name: str) -> None:
        """Lets tensor `name`, or all those of layer `name`, be left unread, if there are any."""
        names = {each for each in self._unread if each == name or each.startswith(f"{name}.")}
        self._unread -= names
        self._progress.update(len(names))

    def check_all_read(self) -> None:
        """Checks that no tensor is left over.

        Raises:
            ModelError: the checkpoint has tensors that the model does not.
        """
        if self._unread:
            names = sorted(self._unread)
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ModelError(f"unknown weight: {', '.join(names[:3])}{more}")

    @contextmanager
    def _open(self, name: str) -> Iterator[Any]:
        path = self._files.get(name)
        if path is None:
            raise ModelError(f"missing weight: {name}")
        try:
            with safe_open(path, framework="pt") as file:
                yield file.get_slice(name)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path.name}: cannot read {name}: {error}") from error
        self.skip(name)


def model_fingerprint(model_dir: Path) -> str:
    """Hex digest of the configuration and of every weight file's name, size and header (names,
    shapes, dtypes, offsets): cheap, and equal on ranks that loaded the same files."""
    digest = hashlib.sha256((model_dir / "config.json").read_bytes())
    for path in sorted(set(dict(_locate(model_dir)).values())):
        digest.update(f"{path.name} {path.stat().st_size} ".encode())
        digest.update(_read_header(path))
    return digest.hexdigest()[:32]


def contents_digest(model_dir: Path) -> str:
    """Hex digest of every weight file's size, time of change and samples of its bytes: other than
    `model_fingerprint`, it tells a model from one trained further."""
    digest = hashlib.sha256()
    for path in sorted(set(dict(_locate(model_dir)).values())):
        status = path.stat()
        digest.update(f"{path.name} {status.st_size} {status.st_mtime_ns} ".encode())
        with path.open("rb") as file:
            for i in range(_SAMPLES):
                file.seek(status.st_size * i // _SAMPLES)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:32]


def _locate(model_dir: Path) -> Iterator[tuple[str, Path]]:
    """Yields (tensor name, file) for a checkpoint with or without an index."""
    index = model_dir / INDEX
    if index.is_file():
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        except (ValueError, KeyError) as error:
            raise ModelError(f"{INDEX}: cannot be read: {error!r}") from error
        paths = {model_dir / file_name for file_name in weight_map.values()}
    else:
        paths = set(model_dir.glob("*.safetensors"))
    if not paths:
        raise ModelError(f"model: no *.safetensors in {model_dir}")
    for path in sorted(paths):
        if not path.is_file():
            raise ModelError(f"{INDEX}: names {path.name}, which does not exist")
        for name in json.loads(_read_header(path)):
            if name != "__metadata__":
                yield name, path


def _read_header(path: Path) -> bytes:
    """The JSON header of a safetensors file: 8 bytes of length, then that many of JSON."""
    with path.open("rb") as file:
        prefix = file.read(8)
        size = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else sys.maxsize
        if size > path.stat().st_size:
            raise ModelError(f"{path.name}: not a safetensors file")
        return file.read(size)
