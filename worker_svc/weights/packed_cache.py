"""Keeps quantized and packed weights in the user's cache directory, so that the next start reads
them instead of quantizing or packing again."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import structlog
import torch
import xxhash

from worker_svc.errors import ModelError
from worker_svc.kv_cache import NewTensor
from worker_svc.user_cache import cache_folder, keep, private_file, private_folder
from worker_svc.weights.safetensors_file import NAMES, Runs, StoredTensor, read_tensors

log = structlog.get_logger(__name__)

# Changes with the format of the files, and with what `quantize`, `Ops.pack` and the readers of
# checkpoints return.
_VERSION = 3
# The number of files kept per model, format and rank. It is above 1 because the checkpoint or the
# CPU may change and change back.
_KEPT = 2
_STALE_S = 3600


def open_cache(
    model_dir: Path,
    fingerprint: str,
    format: str,
    layout: str,
    dtype: torch.dtype,
    rank: int,
    ranks: int,
    layers: range | None = None,
) -> PackedCache | None:
    """Opens the cache of the weights of `model_dir` that this rank packs in `layout` (see `Ops`),
    and quantizes to `format` unless the checkpoint holds them so. It is in `nano-vllm-grpc/packed`
    in the user's cache directory. `layers` are those of a pipeline stage; None: all.

    Returns None if the user has no home directory.
    """
    try:
        folder = cache_folder("packed")
    except OSError as error:
        log.warning("packed weights are not kept; the next start packs again", reason=str(error))
        return None
    path = model_dir.resolve()
    name = re.sub(r"[^\w.-]", "_", path.name)
    place = hashlib.sha256(os.fsencode(path)).hexdigest()[:8]
    key = fingerprint, _VERSION, layout, str(dtype)
    variant = f"{format}-{rank}-of-{ranks}"
    if layers is not None:
        variant += f"-layers-{layers.start}-{layers.stop}"
    return PackedCache(folder / f"{name}-{place}", variant, key)


class PackedCache:
    """A file of packed weights. It is read if it exists, and written if it is missing or not
    complete.

    An error of the file never keeps a worker from starting.
    """

    def __init__(self, directory: Path, variant: str, key: tuple[object, ...]) -> None:
        """Opens the file if it exists.

        Args:
            directory: the model's directory in the cache.
            variant: the format and the rank. Files of one variant replace each other.
            key: everything else on which the packed weights depend.
        """
        digest = hashlib.sha256(repr(key).encode()).hexdigest()[:32]
        self._directory = directory
        self._variant = variant
        self._path = directory / f"{variant}-{digest}.safetensors"
        # The digest of each weight in the file, and its tensors.
        self._weights: dict[str, tuple[str, dict[str, StoredTensor]]] = {}
        self._find()
        self._read: set[str] = set()  # the names of the weights that `get` returned
        self._added: dict[str, dict[str, torch.Tensor]] = {}

    def get(self, name: str, new: NewTensor) -> dict[str, torch.Tensor] | None:
        """The state of weight `name`, or None if the file does not have what was written.

        Args:
            new: makes tensors of a shape and dtype, to be filled.
        """
        if name not in self._weights:
            return None
        digest, stored = self._weights[name]
        state, reason = {}, f"{name} differs"
        try:
            with self._opened() as file:
                for part, tensor in stored.items():
                    state[part] = out = new(tensor.shape, tensor.dtype)
                    Runs(tensor.start, out.nbytes, 0).read(file, 0, _bytes(out))
                is_damaged = _digest(name, state) != digest
                if is_damaged and os.path.samestat(os.fstat(file), self._status):
                    # This start may run out of memory, and the next one must not find the file.
                    self._path.unlink()
        except OSError as error:
            is_damaged, reason = True, str(error)
        if is_damaged:
            self._log_rejection("rejected", reason)
            return None
        self._read.add(name)
        return state

    @property
    def sizes(self) -> list[int]:
        """The bytes of each tensor that `get` may make."""
        tensors = (each for _, stored in self._weights.values() for each in stored.values())
        return [math.prod(each.shape) * each.dtype.itemsize for each in tensors]

    def add(self, name: str, state: dict[str, torch.Tensor]) -> None:
        """Adds the state of weight `name`, which `save` writes unless all were read."""
        self._added[name] = state

    def save(self) -> None:
        """Writes the weights that were added, unless the file has them. Logs if it cannot write."""
        if self._added.keys() <= self._read:
            log.info("packed weights are read", path=str(self._path))
            return
        try:
            with private_folder(self._directory, create=True):
                self._replace(self._added)
        except OSError as error:
            log.warning(
                "packed weights are not kept; the next start packs again",
                path=str(self._path),
                reason=str(error),
            )
            return
        log.info("packed weights are kept", path=str(self._path))

    def _replace(self, states: dict[str, dict[str, torch.Tensor]]) -> None:
        number, temporary = tempfile.mkstemp(suffix=".tmp", dir=self._directory)
        try:
            with open(number, "wb") as file:
                with suppress(OSError):  # another rank may be at work
                    self._drop_old(os.fstat(number).st_mtime)
                _write(file, states)
            keep(Path(temporary), self._path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise

    @contextmanager
    def _opened(self) -> Iterator[int]:
        with (
            private_folder(self._directory) as folder,
            private_file(folder, self._path.name) as number,
        ):
            yield number

    def _find(self) -> None:
        """Reads what the file has, if it exists."""
        try:
            with self._opened() as file:
                self._status = os.fstat(file)
                for key, tensor in read_tensors(Path(f"/dev/fd/{file}")).items():
                    name, digest, part = key.split(":")
                    self._weights.setdefault(name, (digest, {}))[1][part] = tensor
                with suppress(OSError):
                    os.utime(file)  # files used last are dropped last
        except FileNotFoundError:
            pass
        except (ModelError, ValueError) as error:
            self._log_rejection("broken", str(error))
        except OSError as error:
            self._log_rejection("rejected", str(error))

    def _log_rejection(self, how: str, reason: str) -> None:
        self._weights.clear()
        log.warning(f"packed weights are {how}; packing again", path=str(self._path), reason=reason)

    def _drop_old(self, now: float) -> None:
        """Removes all but the newest files of this model, format and rank, and the temporary files
        of writers that were killed."""
        found = self._directory.glob(f"{self._variant}-*.safetensors")
        files = [each for each in found if each != self._path]
        files.sort(key=lambda each: each.stat().st_mtime, reverse=True)
        for path in files[_KEPT - 1 :]:
            path.unlink(missing_ok=True)
        for path in self._directory.glob("*.tmp"):
            if now - path.stat().st_mtime > _STALE_S:
                path.unlink(missing_ok=True)


def _write(file: BinaryIO, states: dict[str, dict[str, torch.Tensor]]) -> None:
    """Writes a safetensors file. The library's own writer copies all tensors before it writes
    one."""
    tensors: dict[str, torch.Tensor] = {}
    for name, state in states.items():
        digest = _digest(name, state)
        tensors |= {f"{name}:{digest}:{part}": tensor for part, tensor in state.items()}
    header, end = {}, 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    file.write(struct.pack("<Q", len(text)) + text)
    for tensor in tensors.values():
        file.write(_bytes(tensor))


def _bytes(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data if len(flat) else memoryview(b"")


def _digest(name: str, state: dict[str, torch.Tensor]) -> str:
    """The XXH3-128 of a weight, which takes as long as reading its bytes."""
    digest = xxhash.xxh3_128(name.encode())
    for part, tensor in sorted(state.items()):
        digest.update(f" {part} {tensor.dtype} {list(tensor.shape)} ".encode())
        digest.update(_bytes(tensor))
    return digest.hexdigest()
