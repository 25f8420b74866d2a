"""Keeps quantized and packed weights in the user's cache directory, so that the next start can map
them instead of quantizing again."""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import structlog
import torch
import xxhash
from safetensors import SafetensorError, safe_open

from worker_svc.user_cache import cache_folder, keep, private_file, private_folder
from worker_svc.weights.quantization.quantize import VERSION
from worker_svc.weights.safetensors_file import NAMES

log = structlog.get_logger(__name__)

# The number of files kept per model, format and rank. It is above 1 because the checkpoint or the
# CPU may change and change back.
_KEPT = 2
_ALIGNMENT = 64  # a cache line
_STALE_S = 3600


def open_cache(
    model_dir: Path,
    fingerprint: str,
    format: str,
    layout: str,
    dtype: torch.dtype,
    rank: int,
    ranks: int,
) -> PackedCache | None:
    """Opens the cache of the weights of `model_dir` that this rank quantizes to `format` and packs
    in `layout` (see `Ops`). It is in `nano-vllm-grpc/packed` in the user's cache directory.

    Returns None if the user has no home directory.
    """
    try:
        folder = cache_folder("packed")
    except OSError as error:
        log.warning(
            "packed weights are not kept; the next start quantizes again", reason=str(error)
        )
        return None
    path = model_dir.resolve()
    name = re.sub(r"[^\w.-]", "_", path.name)
    place = hashlib.sha256(os.fsencode(path)).hexdigest()[:8]
    key = fingerprint, VERSION, layout, str(dtype)
    return PackedCache(folder / f"{name}-{place}", f"{format}-{rank}-of-{ranks}", key)


class PackedCache:
    """A file of packed weights. It is mapped if it exists, and written if it is missing or not
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
        self._names: dict[str, list[str]] = {}  # weight in the file -> the names of its tensors
        self._digests: dict[str, str] = {}
        self._file = self._open()
        self._found: dict[str, dict[str, torch.Tensor]] = {}
        self._added: dict[str, dict[str, torch.Tensor]] = {}

    def get(
        self, name: str, expected: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor] | None:
        """The mapped state of weight `name`, or None if the file does not have it as `expected`.

        Names, shapes and dtypes must be equal, and so must the numbers of tensors that are not on
        the meta device. The bytes of all tensors must have the digests that were written.
        """
        if self._file is None or name not in self._names:
            return None
        state = {each: self._file.get_tensor(f"{name}:{each}") for each in self._names[name]}
        intact = all(self._digests.get(f"{name}:{k}") == _digest(v) for k, v in state.items())
        if not intact or not _alike(state, expected):
            log.warning(
                "packed weights are rejected; quantizing again",
                path=str(self._path),
                reason=f"{name} differs",
            )
            self._file = None
            return None
        self._found[name] = state
        return state

    def add(self, name: str, state: dict[str, torch.Tensor]) -> None:
        """Adds the state of weight `name`, which `save` writes."""
        self._added[name] = state

    def save(self) -> None:
        """Writes all weights found and added, if any were added. Logs if it cannot write."""
        if not self._added:
            log.info("packed weights are mapped", path=str(self._path))
            return
        states = self._found | self._added
        tensors = {f"{name}:{k}": v for name, state in states.items() for k, v in state.items()}
        self._found, self._added, self._file = {}, {}, None
        try:
            with private_folder(self._directory, create=True):
                self._replace(tensors)
        except OSError as error:
            log.warning(
                "packed weights are not kept; the next start quantizes again",
                path=str(self._path),
                reason=str(error),
            )
            return
        log.info("packed weights are kept", path=str(self._path))

    def _replace(self, tensors: dict[str, torch.Tensor]) -> None:
        number, temporary = tempfile.mkstemp(suffix=".tmp", dir=self._directory)
        try:
            with open(number, "wb") as file:
                self._drop_old(os.fstat(number).st_mtime)
                _write(file, tensors)
            keep(Path(temporary), self._path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise

    def _open(self) -> Any:
        try:
            with (
                private_folder(self._directory) as folder,
                private_file(folder, self._path.name) as number,
            ):
                file: Any = safe_open(f"/dev/fd/{number}", framework="pt")
                with suppress(OSError):
                    os.utime(number)  # files used last are dropped last
        except FileNotFoundError:
            return None
        except SafetensorError as error:
            log.warning(
                "packed weights are broken; quantizing again",
                path=str(self._path),
                reason=str(error),
            )
            return None
        except OSError as error:
            log.warning(
                "packed weights are rejected; quantizing again",
                path=str(self._path),
                reason=str(error),
            )
            return None
        self._digests = file.metadata() or {}
        keys: list[str] = file.keys()
        for key in keys:
            name, _, part = key.rpartition(":")
            self._names.setdefault(name, []).append(part)
        return file

    def _drop_old(self, now: float) -> None:
        """Removes all but the newest files of this model, format and rank, and the temporary files
        of writers that were killed."""
        found = self._directory.glob(f"{self._variant}-*.safetensors")
        files = [each for each in found if each != self._path]
        files.sort(key=lambda each: each.stat().st_mtime, reverse=True)
        for path in files[_KEPT - 1 :]:
            path.unlink(missing_ok=True)  # a process that has mapped the file keeps it
        for path in self._directory.glob("*.tmp"):
            if now - path.stat().st_mtime > _STALE_S:
                path.unlink(missing_ok=True)


def _alike(state: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> bool:
    return state.keys() == expected.keys() and all(
        (found.dtype, found.shape) == (other.dtype, other.shape)
        and (other.is_meta or torch.equal(found, other))
        for found, other in ((state[name], expected[name]) for name in expected)
    )


def _write(file: BinaryIO, tensors: dict[str, torch.Tensor]) -> None:
    """Writes a safetensors file. The library's own writer copies all tensors before it writes one,
    and it aligns them to only 8 bytes, which would slow down kernels."""
    # Tensors whose sizes are multiples of a cache line come first, so that each begins at a line.
    order = sorted(tensors, key=lambda name: tensors[name].nbytes % _ALIGNMENT != 0)
    digests = {name: _digest(tensor) for name, tensor in tensors.items()}
    header: dict[str, Any] = {"__metadata__": digests}
    end = 0
    for name in order:
        tensor = tensors[name]
        begin, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    file.write(struct.pack("<Q", len(text)) + text)
    for name in order:
        file.write(_bytes(tensors[name]))


def _bytes(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data if len(flat) else memoryview(b"")


def _digest(tensor: torch.Tensor) -> str:
    """The XXH3-128 of a tensor's bytes, which takes as long as reading them."""
    return xxhash.xxh3_128(_bytes(tensor)).hexdigest()
