"""Finds the files of a GGUF model. Large models are split into NAME-00001-of-0000N.gguf and so on,
by llama.cpp's gguf-split (`llama_split_path`)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from worker_svc.gguf.configuration import Keys
from worker_svc.gguf.header import GgufError, Header, Tensor, read_header

SUFFIX = ".gguf"
_PART = re.compile(r"(?P<model>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})")
_MAX_PARTS = 1 << 10  # ten times those of the largest models


def model_stem(file: Path) -> str:
    """The name of a file's model, without the number of a part."""
    part = _PART.fullmatch(file.stem)
    return part["model"] if part else file.stem


def part_name(stem: str, number: int, count: int) -> str:
    """The file name of part `number`, from 1, of `count` parts of a model."""
    return f"{stem}-{number:05}-of-{count:05}{SUFFIX}"


def models_in(folder: Path) -> list[Path]:
    """The first file of each GGUF model in a folder."""
    found: dict[str, Path] = {}
    for file in sorted(folder.glob(f"*{SUFFIX}")):
        part = _PART.fullmatch(file.stem)
        found.setdefault(f"{part['model']} of {part['count']}" if part else file.name, file)
    return list(found.values())


def find_parts(file: Path) -> list[Path]:
    """All files of a model of which `file` is one, or the file itself if it is not split.

    Raises:
        GgufError: the name is of an impossible part, or other parts are missing.
        OSError: the file does not exist.
    """
    # A link may have the name of a part, as in Hugging Face's cache, or lead to a part.
    named = file.absolute() if _PART.fullmatch(file.stem) else file.resolve(strict=True)
    part = _PART.fullmatch(named.stem)
    if part is None:
        return [named]
    number, count = int(part["number"]), int(part["count"])
    if not 1 <= number <= count <= _MAX_PARTS:
        raise GgufError(f"part {number} of {count} is not one of 1 to {_MAX_PARTS} parts")
    parts = [named.with_name(part_name(part["model"], each + 1, count)) for each in range(count)]
    if missing := [each.name for each in parts if not each.is_file()]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise GgufError(f"part {number} of {count}; {missing[0]}{more} is missing beside it")
    return parts


def read_parts(parts: Sequence[Path]) -> Header:
    """The header of a model in these files: the keys of the first and the tensors of all.

    Raises:
        GgufError: a file has an invalid header, is not the part that its name says, or has a tensor
            that another part has, too. Or tensors are missing.
        OSError: a file cannot be read.
    """
    headers = [_read_part(file, number, len(parts)) for number, file in enumerate(parts)]
    tensors: dict[str, Tensor] = {}
    for header in headers:
        for name, tensor in header.tensors.items():
            if name in tensors:
                first, second = tensors[name].file.name, tensor.file.name
                raise GgufError(f"{name}: the tensor is in both {first} and {second}")
            tensors[name] = tensor
    if len(parts) > 1:
        for file, header in zip(parts, headers, strict=True):
            total = Keys(header.keys).get("split.tensors.count", int, len(tensors))
            if total != len(tensors):
                raise GgufError(
                    f"{file.name}: split.tensors.count: {total}, but all parts have {len(tensors)}"
                )
    return Header(headers[0].keys, tensors)


def _read_part(file: Path, number: int, count: int) -> Header:
    """Part `number`, from 0, of `count`."""
    try:
        header = read_header(file)
        keys = Keys(header.keys)
        total = keys.get("split.count", int, 0) or 1
        if count == 1 < total:
            first = part_name("NAME", 1, total)
            raise GgufError(f"split.count: {total}; name the parts {first} and so on")
        if total != count:
            raise GgufError(f"split.count: {total}, but its name says {count}")
        found = keys.get("split.no", int, 0)
        if found != number:
            raise GgufError(f"split.no: {found}, but by its name it is {number}")
    except GgufError as error:
        if count == 1:
            raise
        raise GgufError(f"{file.name}: {error}") from error
    return header
