"""Finds the *.safetensors files of a checkpoint, and which of them holds each tensor.

If there is an index, it decides, because a file may hold an outdated copy of another file's tensor.
This module does not import torch, because the launcher uses it too.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from shared.model_directory import is_plain_name, read_text
from worker_svc.errors import ModelError

INDEX = "model.safetensors.index.json"
_MAX_HEADER = 100_000_000  # bytes; the library has this limit too


def check_shards(model_dir: Path) -> None:
    """Reads the headers of a checkpoint's files, and checks that each tensor is found in one.

    Raises:
        ModelError: as `shard_files`, `read_header` and `tensor_files`.
    """
    tensor_files(model_dir, {path: read_header(path)[0] for path in shard_files(model_dir)})


def shard_files(model_dir: Path) -> list[Path]:
    """The files that a checkpoint's index names, or without an index all, sorted by name.

    Raises:
        ModelError: the index is malformed or names missing files.
    """
    index = _read_index(model_dir)
    if index is None:
        paths = set(model_dir.glob("*.safetensors"))
    else:
        paths = {model_dir / name for name in index.values()}
    for path in sorted(paths):
        if not path.is_file():
            raise ModelError(f"{INDEX}: names {path.name}, which does not exist")
    return sorted(paths)


def tensor_files(model_dir: Path, names: Mapping[Path, Iterable[str]]) -> dict[str, Path]:
    """The file from which to read each tensor.

    Args:
        names: of the tensors that each of the checkpoint's files holds.

    Raises:
        ModelError: the index puts a tensor into a file that does not hold it, or two files hold a
            tensor that the index does not list.
    """
    index = _read_index(model_dir) or {}
    found: dict[str, Path] = {}
    for path in sorted(names):
        for name in names[path]:
            if index.get(name, path.name) != path.name:
                continue
            if name in found:
                raise ModelError(
                    f"{name}: both {found[name].name} and {path.name} hold it, and no {INDEX} says "
                    "which to read; remove the outdated file"
                )
            found[name] = path
    for name, file in index.items():
        if name not in found:
            raise ModelError(f"{INDEX}: {name} is not in {file}")
    return found


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """The entries of a safetensors file's tensors by name, and the byte at which the data begin.

    Raises:
        ModelError: the file cannot be read, or its header is too long or malformed.
    """
    try:
        with path.open("rb") as file:
            prefix = file.read(8)
            size = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else _MAX_HEADER + 1
            if size > min(path.stat().st_size - 8, _MAX_HEADER):
                raise ModelError(f"{path.name}: not a safetensors file")
            header = json.loads(file.read(size))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path.name}: not a safetensors file: {error}") from error
    except OSError as error:
        raise ModelError(f"{path.name}: cannot be read: {error}") from error
    if not isinstance(header, dict):
        raise ModelError(f"{path.name}: not a safetensors file")
    header.pop("__metadata__", None)
    return header, 8 + size


def _read_index(model_dir: Path) -> dict[str, str] | None:
    """The name of each tensor's file, or None if the checkpoint has no index."""
    index = model_dir / INDEX
    if not index.is_file():
        return None
    try:
        weight_map = json.loads(read_text(index))["weight_map"]
        entries = dict(weight_map.items())
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{INDEX}: cannot be read: {error!r}") from error
    for tensor, name in entries.items():
        if not is_plain_name(name):
            raise ModelError(
                f"{INDEX}: weight_map: {tensor}: {name!r} is not the name of a file beside it"
            )
    return entries
