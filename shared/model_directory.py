"""Limits on the files of a model directory, which are as whoever made the model wants them.

Links are followed: Hugging Face's cache consists of them. Whoever can put one into the directory
decides what is read as configuration, tokenizer or weights, and could have copied it there.
"""

from __future__ import annotations

import stat
from pathlib import Path, PurePath

MAX_JSON_BYTES = 16 << 20  # twice the index of the largest checkpoints
MAX_TOKENIZER_BYTES = 128 << 20  # four times the largest tokenizers


class ModelFileError(ValueError):
    """A file of a model directory cannot be what it should be; the message names it."""


def check_file(path: Path, max_bytes: int = MAX_JSON_BYTES) -> None:
    """Checks that a file, or what a link leads to, is an ordinary one of bounded size.

    Raises:
        ModelFileError: it is not.
        OSError: it is not there.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ModelFileError(f"{path.name}: not a regular file")
    if status.st_size > max_bytes:
        raise ModelFileError(f"{path.name}: {status.st_size} bytes; the limit is {max_bytes}")


def read_text(path: Path) -> str:
    """The text of a configuration file.

    Raises:
        ModelFileError: as `check_file`.
        OSError, UnicodeDecodeError: it cannot be read.
    """
    check_file(path)
    return path.read_text(encoding="utf-8")


def is_plain_name(name: object) -> bool:
    """Whether `name`, found in a model's file, can only mean a file beside it."""
    return (
        isinstance(name, str)
        and PurePath(name).name == name
        and name not in ("", "..")
        and not any(each in name for each in "\\\0")
    )
