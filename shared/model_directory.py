"""Checks on the files of a model directory, because the model's author decides what they contain.

Links are followed, because Hugging Face's cache consists of them. They add no risk: anybody who can
put a link into the directory could also put the file itself there.
"""

from __future__ import annotations

import stat
from pathlib import Path, PurePath
from typing import Any

MAX_JSON_BYTES = 16 << 20  # twice the index of the largest checkpoints
MAX_TOKENIZER_BYTES = 128 << 20  # four times the largest tokenizers
# In a directory made of a GGUF file: a link to the file, and where each weight is. A split file has
# a link to each part instead.
GGUF_WEIGHTS = "model.gguf"
GGUF_INDEX = "model.gguf.json"
# Of language models beside encoders of images, where files leave them out.
_VOCAB_SIZES = {"gemma3_text": 262208, "mistral": 32000, "ministral3": 131072}


class ModelFileError(ValueError):
    """A file of a model directory is irregular, too large or invalid; the message names it."""


def check_file(path: Path, max_bytes: int = MAX_JSON_BYTES) -> None:
    """Checks that a file, or a link's target, is a regular file of at most `max_bytes`.

    Raises:
        ModelFileError: the file is not regular or is too large.
        OSError: the file does not exist.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ModelFileError(f"{path.name}: not a regular file")
    if status.st_size > max_bytes:
        raise ModelFileError(f"{path.name}: {status.st_size} bytes; the limit is {max_bytes}")


def read_text(path: Path) -> str:
    """Reads the text of a configuration file.

    Raises:
        ModelFileError: the file is not regular or is too large.
        OSError, UnicodeDecodeError: the file cannot be read.
    """
    check_file(path)
    return path.read_text(encoding="utf-8")


def language_model(config: dict[str, Any]) -> dict[str, Any]:
    """The fields of config.json. If the model also takes images, the fields of its language model
    are in `text_config`. Only the model's own field says whether the head is tied."""
    text = config.get("text_config")
    if not isinstance(text, dict):
        return config
    known = _VOCAB_SIZES.get(str(text.get("model_type")))
    sizes = {"vocab_size": known} if known else {}
    text = {name: value for name, value in text.items() if name != "tie_word_embeddings"}
    return {**sizes, **text, **{name: value for name, value in config.items() if value is not None}}


def is_plain_name(name: object) -> bool:
    """Whether `name`, found in a model's file, can only mean a file in that file's directory."""
    return (
        isinstance(name, str)
        and PurePath(name).name == name
        and name not in ("", "..")
        and not any(each in name for each in "\\\0")
    )
